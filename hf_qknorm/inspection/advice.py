"""The scheme that suits a trained model, by four rules: a pure function of its inspection.

The rules, in this order (`convert/README.md` gives the measurements behind them):

1. Logits up to half the cap in a model with norms, or up to twice the cap of a model that has one: nothing.
2. A model that takes norms, with a knee that keeps the loss: `qk_norm_cap`, calibrated.
3. A cap that changes no prediction: a cap alone.
4. Else `qk_norm`, calibrated with a larger limit on the loss.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hf_qknorm.reports.inspection import Advice, Inspection, scheme_name
from hf_qknorm.scheme import SCHEMES, Scheme

HARMLESS_LOSS = 0.1  # of the largest logit: a cap that takes less is harmless where its KL was not measured
HARMLESS_KL = 0.01  # nats: a cap whose measured KL is lower is harmless


def cap_loss(logit: float, cap: float) -> float:
    """The share of a logit that cap·tanh(logit/cap) takes away: 24 % at the cap, 52 % at twice the cap."""
    return 1 - math.tanh(logit / cap) / (logit / cap) if logit else 0.0


def wide_cap(logit: float, cap: float) -> float:
    """The smallest multiple of 10, and at least `cap`, that takes at most a tenth of `logit` away."""
    return max(cap, math.ceil(logit / 0.58381 / 10) * 10.0)  # tanh(x)/x = 0.9 at x = 0.58381


def harmless_cap(found: Inspection) -> float | None:
    """The tighter of two caps that hardly changes the predictions; None if both change them."""
    for cap in dict.fromkeys((found.cap, wide_cap(found.largest, found.cap))):
        trial = found.trials.get(scheme_name(replace(found.present, softcap=cap)))
        if cap_loss(found.largest, cap) <= HARMLESS_LOSS if trial is None else trial.kl <= HARMLESS_KL:
            return cap
    return None


def knee_scheme(found: Inspection) -> Scheme:
    """The scheme that knees are tried with: norms on queries and keys, and a harmless cap unless the model has one."""
    if found.own_cap is not None:
        return SCHEMES["qk_norm"]
    return replace(SCHEMES["qk_norm_cap"], softcap=harmless_cap(found) or wide_cap(found.largest, found.cap))


def advise(found: Inspection) -> Advice:
    """The scheme for this model: the numbers that decide, and the next command or call."""
    (worst, layer), own, largest, base = found.ranked[0], found.own_cap, found.largest, found.base
    seen = f"the largest |logit| is {largest:.1f} ({worst}, head {layer.max_logit.index(largest)})"
    if (own is not None or found.normed) and largest <= (2 * own if own is not None else found.cap / 2):
        bound = f", at most {found.bound:.0f} for any input" if found.bound is not None else ""
        kept = f"its cap of {own:g} bounds them" if own is not None else f"its norms bound them{bound}"
        return Advice(found.present, (seen, f"{kept}: nothing need be added", "watch them in training: LogitMonitor"))
    latent = "a server with a latent cache must hold one number more for each token and head; a cap needs none"
    notes = [latent] * found.latent
    if found.knee is not None and base is not None:
        tried = found.knees[found.knee]
        bound = "" if tried.bound is None else f" and bounds |logit| by {tried.bound:.0f} for any input"
        cost = f"a knee of {found.knee:.3g} costs {tried.loss - base.loss:+.3f} nats (KL {tried.kl:.3f}){bound}"
        call = "calibrate(), or hf-qknorm convert --data TEXT, finds it"
        return Advice(found.knee_scheme, (seen, cost, call, *notes))
    cap = harmless_cap(found)
    if found.normed or cap is not None:
        cap = cap or wide_cap(largest, own or found.cap)
        line = f"a cap of {cap:g} bends the largest logit by {cap_loss(largest, cap):.0%}, and bounds later ones"
        alone = "norms are there already" if found.normed else "no knee was cheap enough, or none was tried"
        return Advice(replace(found.present, softcap=cap), (seen, line, f"{alone}; a cap needs no calibration"))
    scheme = replace(found.present, q=found.present.q or "auto", k=found.present.k or "auto")
    line = "every cap that was tried changes predictions, and norms bound logits by their gains"
    remedy = "calibrate(max_loss_increase=...) keeps most of the loss; KneeSchedule lowers the knee in training"
    return Advice(scheme, (seen, line, remedy, *notes))
