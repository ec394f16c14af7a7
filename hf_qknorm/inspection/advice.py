"""The scheme that suits a trained model, and why: a pure function of its inspection.

The rule, in this order (`convert/README.md` gives the reasons and the measurements behind them):

1. A model with a cap of its own, as Gemma 2, and logits up to twice that cap: nothing.
2. A model that takes norms: `qk_norm_cap`, calibrated with a knee, with a wider cap where 50 changes predictions.
3. A model with norms, as Qwen3: nothing while the logits are up to half the cap, then a cap.
4. A model where no knee is cheap enough: a cap alone, where it changes no prediction.
5. Else `qk_norm`.
"""

from __future__ import annotations

import dataclasses
import math

from hf_qknorm.inspection.report import Advice, Inspection, KneeTrial, KneeTrials
from hf_qknorm.reports.records import COLLAPSED, Prediction
from hf_qknorm.scheme import SCHEMES, Scheme

HARMLESS_LOSS = 0.1  # of the largest logit: a cap that takes less is harmless where its KL was not measured
HARMLESS_KL = 0.01  # nats: a cap whose measured KL is lower is harmless
SERVING = (
    "to serve norms from its latent cache, a server has to cache one number more for each token and head; where it "
    "can't, take a cap, and QuacK or MuonClip in training"
)


def cap_loss(logit: float, cap: float) -> float:
    """The share of a logit that cap·tanh(logit/cap) takes away: 24 % at the cap, 52 % at twice the cap."""
    return 1 - math.tanh(logit / cap) / (logit / cap) if logit else 0.0


def wide_cap(logit: float, cap: float) -> float:
    """The smallest multiple of 10, and at least `cap`, that takes at most a tenth of `logit` away."""
    return max(cap, math.ceil(logit / 0.58381 / 10) * 10.0)  # tanh(x)/x = 0.9 at x = 0.58381


def knee_scheme(found: Inspection) -> Scheme:
    """The scheme that knees are tried with: norms on queries and keys, and a harmless cap unless the model has one."""
    if found.own_cap is not None:
        return SCHEMES["qk_norm"]
    cap, _ = _harmless_cap(found) or (wide_cap(found.largest, found.cap), "")
    return dataclasses.replace(SCHEMES["qk_norm_cap"], softcap=cap)


def advise(found: Inspection) -> Advice:
    """The scheme for this model, with the reasons."""
    risks, largest, own, knees = found.risks, found.largest, found.own_cap, found.knees
    reasons = [f"the largest |logit| is {largest:.1f} ({risks[0].layer}, head {risks[0].max_head})"]
    if collapsed := sum(len(risk.collapsed) for risk in risks):
        reasons.append(
            f"heads that attend to hardly more than one token (entropy under {COLLAPSED:.0%} of even attention's) with "
            f"|logit| over {found.cap / 2:g}: {collapsed}"
        )
    if own is not None:
        loss = f"its cap of {own:g} bends the largest logit by {cap_loss(largest, own):.0%}"
        if largest <= 2 * own:
            reasons.append(f"{loss}, and bounds larger ones too: nothing need be added")
            return Advice(found.present, tuple(reasons))
        passed = f"passes {1 - math.tanh(largest / own) ** 2:.1%} of the gradient"
        reasons.append(f"{loss}: tanh is flat there and {passed}, too little to pull the logit back")
    if own is not None and found.normed:
        wide = wide_cap(largest, own)
        scheme = _with_cap(found, wide)
        more = [f"a cap of {wide:g} bends it by {cap_loss(largest, wide):.0%} and still bounds it"]
    elif knees and knees.chosen:
        scheme, more = knees.scheme, _knee_reasons(found, knees, knees.chosen)
    elif found.normed:
        scheme, more = _advise_normed(found)
    elif own is None and (harmless := _harmless_cap(found)):
        scheme = _with_cap(found, harmless[0])
        more = [
            harmless[1],
            "a cap needs no calibration, and bounds the logits of later training",
            *_costly_knee_reasons(found),
            "for larger learning rates, use qk_norm_cap and calibrate()",
            _fresh_gain_reason(found),
        ]
    else:
        scheme = dataclasses.replace(found.present, q=found.present.q or "auto", k=found.present.k or "auto")
        more = [
            *(_harmful_cap_reasons(found) if own is None else ()),
            "norms on queries and keys bound the logits by √head_dim times their gains",
            _fresh_gain_reason(found),
            "calibrate() removes most of that cost, with a knee nearly all of it: vectors below the knee keep their "
            "length",
        ]
    if found.latent and scheme.norms:
        more.append(SERVING)
    return Advice(scheme, (*reasons, *more))


def _advise_normed(found: Inspection) -> tuple[Scheme, list[str]]:
    """The advice for a model with norms on queries and keys, of a scheme or of its own, and no cap."""
    largest, cap, bound = found.largest, found.cap, found.bound
    allowed = "not in every layer" if bound is None else f"to at most {bound:.0f} for any input"
    if largest <= cap / 2:
        reasons = [
            f"norms on queries and keys bound the logits, {allowed}; a cap of {cap:g} would bend the largest logit by "
            f"{cap_loss(largest, cap):.1%}: nothing need be added"
        ]
        if bound is not None and bound > 2 * cap:
            reasons.append("the gains allow far more than was seen: watch them and the logits with LogitMonitor")
        return found.present, reasons
    chosen, *reasons = _harmless_cap(found) or (wide_cap(largest, cap),)
    return _with_cap(found, chosen), [
        f"norms on queries and keys bound the logits in proportion to their gains ({allowed}), and these "
        "gains allow large ones",
        *reasons,
        "nothing but a cap can be added to norms; if the gains grow in training, decay or clip them, or lower the rate",
    ]


def _harmless_cap(found: Inspection) -> tuple[float, str] | None:
    """The tighter of two caps that hardly changes the predictions, with the reason; None if both change them."""
    largest, cap = found.largest, found.cap
    for chosen in dict.fromkeys((cap, wide_cap(largest, cap) if largest <= 2 * cap else cap)):
        loss, trial = cap_loss(largest, chosen), found.trials.get(_with_cap(found, chosen))
        bends = f"a cap of {chosen:g} bends the largest logit by"
        if trial is not None and trial.kl <= HARMLESS_KL:
            return chosen, f"{bends} {loss:.0%}; measured, it costs {_cost_text(trial)}"
        if trial is None and loss <= HARMLESS_LOSS:
            return chosen, f"{bends} no more than {loss:.0%}"
    return None


def _with_cap(found: Inspection, cap: float) -> Scheme:
    return dataclasses.replace(found.present, softcap=cap)


def _knee_reasons(found: Inspection, knees: KneeTrials, chosen: KneeTrial) -> list[str]:
    """Cost and bound of the knee that `calibrate` would choose, of smaller ones, and the cap without calibration."""
    bound = "" if chosen.bound is None else f", and no input can give a |logit| over {chosen.bound:.0f}"
    reasons = [
        f"calibrate() finds gains and a knee of {chosen.knee:.3g} for this scheme: the loss changes by "
        f"{chosen.rise:+.3f} nats, with a KL of {chosen.kl:.3f} (allowed: {knees.limit:.3f}; fresh gains and no knee: "
        f"{knees.jump:.3f}){bound}"
    ]
    if tighter := [trial for trial in knees.trials if trial.knee < chosen.knee and trial.bound is not None]:
        costs = ", ".join(f"{trial.knee:.3g}: +{trial.rise:.3f}, at most {trial.bound:.0f}" for trial in tighter[-2:])
        reasons.append(
            f"a smaller knee bounds the logits tighter and costs more ({costs}); KneeSchedule lowers it in training"
        )
    if harmless := _harmless_cap(found):
        reasons.append(f"without calibration: {harmless[1]} (Scheme(softcap={harmless[0]:g}))")
    return reasons


def _harmful_cap_reasons(found: Inspection) -> list[str]:
    """Why a cap alone does not suit the model, nor a knee if knees were tried."""
    cap, largest = found.cap, found.largest
    trial = found.trials.get(_with_cap(found, cap))
    cost = f" (measured: {_cost_text(trial)})" if trial else ""
    return [
        f"a cap of {cap:g} would bend the largest logit by {cap_loss(largest, cap):.0%}{cost}, and one wide enough to "
        f"leave it alone ({wide_cap(largest, cap):g}) would let the logits grow further",
        *_costly_knee_reasons(found),
    ]


def _costly_knee_reasons(found: Inspection) -> list[str]:
    """The cost of the best knee, if knees were tried and all cost too much."""
    if not found.knees or found.knees.chosen:
        return []
    best = min(found.knees.trials, key=lambda trial: trial.cost)
    return [
        f"norms with a knee cost more than the {found.knees.limit:.3f} nats that calibrate() allows: "
        f"{best.cost:.3f} with a knee of {best.knee:.3g} (max_loss_increase allows more)"
    ]


def _fresh_gain_reason(found: Inspection) -> str:
    """The cost of norms with fresh gains, as far as it was measured."""
    queries, both = (found.trials.get(SCHEMES[name]) for name in ("q_norm", "qk_norm"))
    if queries is None or both is None:
        return "the norm of the keys costs the most, because a key's length sets its weight; q_norm costs less"
    worse = ": the keys' norm is the damaging half" if both.kl > 2 * queries.kl else ""
    costs = f"norms on queries alone cost {_cost_text(queries)}, on keys too {_cost_text(both)}"
    return f"measured with fresh gains, {costs}{worse}"


def _cost_text(trial: Prediction) -> str:
    return f"a KL of {trial.kl:.2g}, {trial.agreement:.1%} same top token"
