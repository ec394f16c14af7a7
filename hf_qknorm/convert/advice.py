"""Which layers are at risk, and which scheme to take: a pure function of what was measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_qknorm.scheme import SCHEMES, Scheme
from hf_qknorm.stats.records import LayerStatistics, Prediction

BENT = 0.1  # a cap may bend the largest logit by so much without being asked what that costs
COST = 0.01  # nats of KL that a cap may cost, where it was measured
COLLAPSED = 0.1  # of the entropy of even attention: below, a head looks at hardly more than one token
LEVELS = ("calm", "raised", "large", "runaway")  # of a cap: up to half, up to all, up to twice, beyond


@dataclass(frozen=True)
class KneeTrial:
    """A knee that was put on for a moment, with gains in closed form.

    `rise` is that of the loss (nats a token) over the unpatched model's, `kl` the KL from it; `cost` is the larger.
    `bound` is the largest |logit| of any layer that any input can give, None where there is no bound.
    """

    knee: float
    rise: float
    kl: float
    bound: float | None

    @property
    def cost(self) -> float:
        """By which `calibrate` judges, as `convert.knees.cost`."""
        return max(self.rise, self.kl)


@dataclass(frozen=True)
class KneeTrials:
    """The cost of each knee, put on with a `scheme`; `jump` is the rise in loss with fresh gains and no knee.

    `limit` is the cost that `calibrate` allows by default.
    """

    scheme: Scheme
    jump: float
    limit: float
    trials: tuple[KneeTrial, ...]

    @property
    def chosen(self) -> KneeTrial | None:
        """The smallest knee that costs no more than the limit; None if all cost more."""
        return next((trial for trial in self.trials if trial.cost <= self.limit), None)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON-ready data; `chosen` is the knee alone."""
        chosen = None if self.chosen is None else self.chosen.knee
        return {**dataclasses.asdict(self), "scheme": self.scheme.to_dict(), "chosen": chosen}


@dataclass(frozen=True)
class Situation:
    """What is known of a model: its layers, and what already keeps their logits in bounds.

    `scheme` is what it is patched with ("none" if it is not); `normed` whether queries and keys have norms, the
    scheme's or the model's own; `own_cap` the cap in force. `cap` is what logits are held against; `even` the entropy
    (nats) of even attention by layer; `trials` what schemes cost when just put on, with fresh gains; `knees` what norms
    cost that keep lengths up to a knee, with gains in closed form.
    """

    layers: Mapping[str, LayerStatistics]
    cap: float
    even: Mapping[str, float]
    scheme: Scheme = SCHEMES["none"]
    normed: bool = False
    own_cap: float | None = None
    trials: Mapping[Scheme, Prediction] = dataclasses.field(default_factory=dict)
    knees: KneeTrials | None = None

    @property
    def largest(self) -> float:
        """The largest |logit| of all heads."""
        return max(max(layer.max_logit) for layer in self.layers.values())


@dataclass(frozen=True)
class Risk:
    """A layer's largest |logit| and lowest entropy, the heads they belong to, and the heads that have collapsed."""

    layer: str
    level: str
    max_logit: float
    max_head: int
    entropy: float
    entropy_head: int
    collapsed: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {**dataclasses.asdict(self), "collapsed": list(self.collapsed)}


@dataclass(frozen=True)
class Advice:
    """The scheme to take, and why; it is the model's own if nothing need be done."""

    scheme: Scheme
    reasons: tuple[str, ...]

    @property
    def name(self) -> str:
        """The scheme as a user would name it."""
        return name_of(self.scheme)

    def to_dict(self) -> dict[str, Any]:
        """Name, scheme and reasons as JSON-ready data."""
        return {"name": self.name, "scheme": self.scheme.to_dict(), "reasons": list(self.reasons)}


def name_of(scheme: Scheme) -> str:
    """The preset's name, or the scheme spelt out in Python."""
    for name, preset in SCHEMES.items():
        if preset == scheme:
            return name
    fields = ((field, getattr(scheme, field.name)) for field in dataclasses.fields(scheme))
    return f"Scheme({', '.join(f'{field.name}={value!r}' for field, value in fields if value != field.default)})"


def bend(logit: float, cap: float) -> float:
    """The share of a logit that c·tanh(logit/c) takes away: 24 % at the cap, 52 % at twice it."""
    return 1 - math.tanh(logit / cap) / (logit / cap) if logit else 0.0


def wide_cap(logit: float, cap: float) -> float:
    """The smallest multiple of 10, and at least `cap`, that bends `logit` by no more than a tenth."""
    return max(cap, math.ceil(logit / 0.58381 / 10) * 10.0)  # there tanh(x)/x = 0.9


def rank(situation: Situation) -> tuple[Risk, ...]:
    """All layers, those at the greatest risk first: by the largest |logit|, which is what diverges."""
    risks = []
    for name, layer in situation.layers.items():
        head = max(range(len(layer.max_logit)), key=layer.max_logit.__getitem__)
        sharp = min(range(len(layer.entropy)), key=layer.entropy.__getitem__)
        # alone, a low entropy is no fault: heads that look at the token before are born so
        collapsed = tuple(
            i
            for i, (entropy, logit) in enumerate(zip(layer.entropy, layer.max_logit, strict=True))
            if entropy < COLLAPSED * situation.even[name] and logit > situation.cap / 2
        )
        largest = layer.max_logit[head]
        level = LEVELS[sum(largest > factor * situation.cap for factor in (0.5, 1, 2))]
        risks.append(Risk(name, level, largest, head, layer.entropy[sharp], sharp, collapsed))
    return tuple(sorted(risks, key=lambda risk: -risk.max_logit))


def advise(situation: Situation) -> Advice:
    """The scheme and the cap for this model, with the reasons."""
    risks = rank(situation)
    worst = risks[0]
    reasons = [f"the largest |logit| is {worst.max_logit:.1f} ({worst.layer}, head {worst.max_head})"]
    if collapsed := sum(len(risk.collapsed) for risk in risks):
        reasons.append(
            f"heads that attend to hardly more than one token (entropy under {COLLAPSED:.0%} of even attention's) with "
            f"|logit| over {situation.cap / 2:g}: {collapsed}. Training diverges there first"
        )
    kept = situation.knees.chosen if situation.knees else None
    if situation.own_cap is not None:
        scheme, why = _capped(situation, situation.own_cap)
    elif situation.knees and kept:
        scheme, why = situation.knees.scheme, _of_knees(situation, situation.knees, kept)
    elif situation.normed:
        scheme, why = _normed(situation)
    else:
        scheme, why = _raw(situation)
    return Advice(scheme, (*reasons, *why))


def scheme_for_knees(situation: Situation) -> Scheme:
    """The scheme that knees are tried with: norms on queries and keys and, unless the model has one, a cap.

    The cap is the tightest that leaves the predictions as they are.
    """
    if situation.own_cap is not None:
        return SCHEMES["qk_norm"]
    found = _cap(situation)
    cap = found[0] if found else wide_cap(situation.largest, situation.cap)
    return dataclasses.replace(SCHEMES["qk_norm_cap"], softcap=cap)


def _of_knees(situation: Situation, knees: KneeTrials, kept: KneeTrial) -> list[str]:
    """Cost and bound of the knee that calibrate() would choose, and of smaller ones."""
    bound = "" if kept.bound is None else f", and no input can give a |logit| over {kept.bound:.0f}"
    lead = (
        f"calibrate() finds gains and a knee of {kept.knee:g} for it: the loss rises by {kept.rise:.3f} nats, with "
        f"a KL of {kept.kl:.3f} (allowed: {knees.limit:.3f}; fresh gains and no knee: {knees.jump:.3f}){bound}"
    )
    reasons = [lead]
    tighter = [trial for trial in knees.trials if trial.knee < kept.knee and trial.bound is not None]
    if tighter:
        costs = ", ".join(f"{trial.knee:g}: +{trial.rise:.3f}, at most {trial.bound:.0f}" for trial in tighter[-2:])
        reasons.append(
            f"a smaller knee bounds the logits tighter and costs more ({costs}); KneeSchedule lowers it in training"
        )
    if cap := _cap(situation):
        reasons.append(f"without calibration: {cap[1][0]} (Scheme(softcap={cap[0]:g}))")
    return reasons


def _capped(situation: Situation, own: float) -> tuple[Scheme, list[str]]:
    largest = situation.largest
    bent = f"its cap of {own:g} bends that by {bend(largest, own):.0%}"
    if largest <= 2 * own:
        return situation.scheme, [f"{bent}, and bounds whatever comes: nothing need be added"]
    left = 1 - math.tanh(largest / own) ** 2
    flat = f"{bent}: there tanh is flat and lets {left:.1%} of the gradient through, so that nothing pulls it back"
    if situation.normed:
        wide = wide_cap(largest, own)
        scheme = dataclasses.replace(situation.scheme, softcap=wide)
        return scheme, [flat, f"a cap of {wide:g} bends it by {bend(largest, wide):.0%} and still bounds it"]
    knees = situation.knees
    if knees and knees.chosen:
        return knees.scheme, [flat, *_of_knees(situation, knees, knees.chosen)]
    return _with_norms(situation), [flat, *_of_norms(situation)]


def _normed(situation: Situation) -> tuple[Scheme, list[str]]:
    largest, cap = situation.largest, situation.cap
    if largest <= cap / 2:
        nothing = f"a cap of {cap:g} would bend that by {bend(largest, cap):.1%}"
        return situation.scheme, [f"norms on queries and keys bound the logits; {nothing}: nothing need be added"]
    chosen, why = _cap(situation) or (wide_cap(largest, cap), [])
    grown = "norms on queries and keys bound the logits only as far as their gains allow, and these have grown"
    return dataclasses.replace(situation.scheme, softcap=chosen), [
        grown,
        *why,
        "a cap is all that can be added to norms",
    ]


def _raw(situation: Situation) -> tuple[Scheme, list[str]]:
    found = _cap(situation)
    if found is not None:
        why = [*found[1], "a cap needs no calibration, and bounds what the next training does to the logits"]
        scheme = dataclasses.replace(situation.scheme, softcap=found[0])
        return scheme, [*why, *_of_no_knee(situation), *_of_more(situation)]
    cap, largest = situation.cap, situation.largest
    narrow = f"a cap of {cap:g} would bend that by {bend(largest, cap):.0%}"
    if measured := situation.trials.get(dataclasses.replace(situation.scheme, softcap=cap)):
        narrow += f" (measured: {_told(measured)})"
    wide = f"one wide enough to leave it alone ({wide_cap(largest, cap):g}) would let logits grow on"
    return _with_norms(situation), [f"{narrow}, and {wide}", *_of_no_knee(situation), *_of_norms(situation)]


def _cap(situation: Situation) -> tuple[float, list[str]] | None:
    """The tightest of two caps that leaves the model what it is, and why; None if neither does."""
    largest, cap = situation.largest, situation.cap
    wide = wide_cap(largest, cap)
    for chosen in dict.fromkeys((cap, wide if largest <= 2 * cap else cap)):
        bent = bend(largest, chosen)
        measured = situation.trials.get(dataclasses.replace(situation.scheme, softcap=chosen))
        if measured is not None and measured.kl <= COST:
            return chosen, [f"a cap of {chosen:g} bends that by {bent:.0%}; measured, it costs {_told(measured)}"]
        if measured is None and bent <= BENT:
            return chosen, [f"a cap of {chosen:g} bends that by no more than {bent:.0%}"]
    return None


def _with_norms(situation: Situation) -> Scheme:
    scheme = situation.scheme
    return dataclasses.replace(scheme, q=scheme.q or "auto", k=scheme.k or "auto")


def _of_norms(situation: Situation) -> list[str]:
    return [
        "norms on queries and keys bound the logits by √head_dim times their gains",
        *_fresh(situation),
        "calibrate() takes that back: with a knee nearly all of it, as vectors keep their lengths up to there",
        "a cap beside the norms (qk_norm_cap) is for the largest learning rates: it costs a little perplexity",
    ]


def _of_no_knee(situation: Situation) -> list[str]:
    """That no knee was good enough, where knees were tried."""
    if not situation.knees or situation.knees.chosen:
        return []
    best = min(situation.knees.trials, key=lambda trial: trial.cost)
    return [
        f"norms with a knee cost more than the {situation.knees.limit:.3f} nats that calibrate() allows: "
        f"{best.cost:.3f} with a knee of {best.knee:g} (max_loss_increase allows more)"
    ]


def _of_more(situation: Situation) -> list[str]:
    return ["for several times the usual learning rate take qk_norm_cap and calibrate()", *_fresh(situation)]


def _fresh(situation: Situation) -> list[str]:
    """What norms with fresh gains cost, as far as it was measured."""
    queries, both = (situation.trials.get(SCHEMES[name]) for name in ("q_norm", "qk_norm"))
    if queries is None or both is None:
        return ["the keys' norm costs the most, as their length says who is attended to; q_norm is the mild half"]
    told = f"measured with fresh gains, norms on queries alone cost {_told(queries)}, on keys too {_told(both)}"
    return [told + (": the keys' norm is the damaging half" if both.kl > 2 * queries.kl else "")]


def _told(measured: Prediction) -> str:
    return f"a KL of {measured.kl:.2g}, {measured.agreement:.1%} same top token"
