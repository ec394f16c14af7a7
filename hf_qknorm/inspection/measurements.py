"""The measurements of an inspection, and the layers at risk of diverging logits that follow from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress, count
from typing import Any

from hf_qknorm.calibration.knees import with_margin
from hf_qknorm.reports.records import LayerStatistics, Prediction, to_json
from hf_qknorm.scheme import SCHEMES, Scheme

COLLAPSED = 0.1  # of the entropy of even attention: a head below it attends to hardly more than one token
LEVELS = ("calm", "raised", "large", "runaway")  # largest |logit| up to half the cap, the cap, twice the cap, above


@dataclass(frozen=True)
class KneeTrial:
    """A knee tried with closed-form gains: the `rise` in loss and the `kl` from the unpatched model, in nats per token.

    `bound` is the largest |logit| of any layer for any input; None without a bound.
    """

    knee: float
    rise: float
    kl: float
    bound: float | None

    @property
    def cost(self) -> float:
        """The larger of rise and KL, as in `calibration.knees.cost`."""
        return max(self.rise, self.kl)


@dataclass(frozen=True)
class KneeTrials:
    """The knees tried with a `scheme`. `jump` is the rise in loss with fresh gains and no knee.

    `limit` is the cost that `calibrate` accepts by default.
    """

    scheme: Scheme
    jump: float
    limit: float
    trials: tuple[KneeTrial, ...]

    @property
    def chosen(self) -> KneeTrial | None:
        """The trial of the knee that `calibrate` sets, with a margin; None if all cost more than the limit."""
        by_knee = {trial.knee: trial for trial in self.trials}
        return by_knee[with_margin(self.least, [*by_knee])] if math.isfinite(self.least) else None

    @property
    def least(self) -> float:
        """The smallest knee that costs at most the limit; infinite if all cost more."""
        return min((trial.knee for trial in self.trials if trial.cost <= self.limit), default=math.inf)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready data, with the chosen knee as a number."""
        return to_json({**vars(self), "chosen": self.chosen and self.chosen.knee})


@dataclass(frozen=True)
class Measurements:
    """The measurements of a model that advice is derived from.

    `layers` has the statistics by layer, relative to `cap`, and `even` the entropy (nats) of even attention. `scheme`
    is the model's, "none" if it is unpatched. `normed` is whether queries and keys both have norms, of the scheme or of
    the model itself, `latent` whether a latent is cached in place of keys, and `own_cap` the cap in force. `trials` are
    the predictions with schemes with fresh gains. `bound` is the largest |logit| that these norms let any input have,
    in the worst layer; None without a bound.
    """

    layers: Mapping[str, LayerStatistics]
    cap: float
    even: Mapping[str, float]
    scheme: Scheme = SCHEMES["none"]
    normed: bool = False
    latent: bool = False
    own_cap: float | None = None
    trials: Mapping[Scheme, Prediction] = dataclasses.field(default_factory=dict)
    knees: KneeTrials | None = None
    bound: float | None = None

    @property
    def largest(self) -> float:
        """The largest |logit| of all heads."""
        return max(max(layer.max_logit) for layer in self.layers.values())


@dataclass(frozen=True)
class Risk:
    """A layer's largest |logit| and lowest entropy with their heads, and the heads whose attention has collapsed."""

    layer: str
    level: str
    max_logit: float
    max_head: int
    entropy: float
    entropy_head: int
    collapsed: tuple[int, ...]


def rank_layers(measured: Measurements) -> tuple[Risk, ...]:
    """The risk of each layer, highest first, by the largest |logit|: training diverges at large logits."""
    risks = []
    for name, layer in measured.layers.items():
        logits, entropies = layer.max_logit, layer.entropy
        largest, sharpest = max(logits), min(entropies)
        # low entropy with small logits is normal: heads that attend to the previous token have it from the start
        least = COLLAPSED * measured.even[name]
        collapsed = [e < least and logit > measured.cap / 2 for e, logit in zip(entropies, logits, strict=True)]
        level = LEVELS[sum(largest > factor * measured.cap for factor in (0.5, 1, 2))]
        heads = logits.index(largest), entropies.index(sharpest)
        risks.append(Risk(name, level, largest, heads[0], sharpest, heads[1], tuple(compress(count(), collapsed))))
    return tuple(sorted(risks, key=lambda risk: -risk.max_logit))
