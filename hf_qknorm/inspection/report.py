"""An inspection: a model's numbers, what schemes and knees would do to it, and advice; as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_qknorm.calibration.knees import with_margin
from hf_qknorm.reports import tables
from hf_qknorm.reports.records import FORMAT, LayerStatistics, Prediction, largest_bound, predictions_table, to_json
from hf_qknorm.reports.report import save_json
from hf_qknorm.scheme import SCHEMES, Scheme

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


@dataclass(frozen=True)
class Advice:
    """The scheme to use, and the reasons, at most four; the model's own scheme if nothing need be added."""

    scheme: Scheme
    reasons: tuple[str, ...]

    @property
    def name(self) -> str:
        """The scheme as a user would write it."""
        return scheme_name(self.scheme)


def scheme_name(scheme: Scheme) -> str:
    """The preset's name, or the scheme as Python code."""
    for name, preset in SCHEMES.items():
        if preset == scheme:
            return name
    fields = ((field, getattr(scheme, field.name)) for field in dataclasses.fields(scheme))
    return f"Scheme({', '.join(f'{field.name}={value!r}' for field, value in fields if value != field.default)})"


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect_model`: `layers` by name, `risks` by layer (highest first), and the `advice`.

    `base` is the prediction of the unpatched model, `patched` the prediction of a patched model as it is (None if it is
    unpatched). Both are None without a language-modelling head. `trials` are predictions with schemes with fresh gains,
    before any calibration. `knees` are loss and bound at each knee that `calibrate` tries (None for a model that is
    patched, takes no norms, or predicts no tokens). `scheme` is the model's (None if it is unpatched). Shares of large
    logits are relative to `cap`; `own_cap` is the cap in force. `normed` is whether queries and keys both have norms,
    of the scheme or of the model itself, `latent` whether a latent is cached in place of keys. `length` is the length
    of the longest sequence of the text, `context` the longest that the model is for (None where unknown).

    >>> found = qk.inspect_model(model, texts)
    >>> found.largest == max(risk.max_logit for risk in found.risks)
    True
    >>> found.save("inspect.json")
    """

    model: str
    model_type: str
    tokens: int
    length: int
    cap: float
    layers: Mapping[str, LayerStatistics]
    scheme: Scheme | None = None
    base: Prediction | None = None
    patched: Prediction | None = None
    trials: Mapping[Scheme, Prediction] = dataclasses.field(default_factory=dict)
    knees: KneeTrials | None = None
    advice: Advice = Advice(SCHEMES["none"], ())
    normed: bool = False
    latent: bool = False
    own_cap: float | None = None
    context: int | None = None

    @property
    def largest(self) -> float:
        """The largest |logit| of all heads."""
        return max(max(layer.max_logit) for layer in self.layers.values())

    @property
    def bound(self) -> float | None:
        """The largest |logit| that norms let any input have, in the worst layer; None without a bound."""
        return largest_bound(layer.bound for layer in self.layers.values())

    @property
    def present(self) -> Scheme:
        """The model's scheme, "none" if it is unpatched."""
        return self.scheme or SCHEMES["none"]

    @property
    def keeps(self) -> bool:
        """Whether the advice is to leave the model as it is."""
        return self.advice.scheme == self.present

    @property
    def risks(self) -> tuple[Risk, ...]:
        """The risk of each layer, highest first, by the largest |logit|: training diverges at large logits."""
        risks = []
        for name, layer in self.layers.items():
            logits, entropies = layer.max_logit, layer.entropy
            largest, sharpest = max(logits), min(entropies)
            level = LEVELS[sum(largest > factor * self.cap for factor in (0.5, 1, 2))]
            heads = logits.index(largest), entropies.index(sharpest)
            risks.append(Risk(name, level, largest, heads[0], sharpest, heads[1], layer.collapsed(self.cap)))
        return tuple(sorted(risks, key=lambda risk: -risk.max_logit))

    @property
    def title(self) -> str:
        """The model and the text of its measurement."""
        heads = len(next(iter(self.layers.values())).max_logit)
        state = "unpatched" if self.scheme is None else str(self.scheme)
        return (
            f"{self.model}: {self.model_type}, {len(self.layers)} layers of {heads} heads, {state}; "
            f"{self.tokens:,} tokens in sequences of up to {self.length}"
        )

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """The measurements, the layers at the highest risk, and the advice, as a page of text."""
        named = {"unpatched": self.base, "as it is": self.patched}
        named |= {scheme_name(scheme) + ", fresh gains" * bool(scheme.norms): p for scheme, p in self.trials.items()}
        rows = self._layer_rows()
        notes = {"gains q, k": tables.GAINS, "bound": tables.BOUND}
        reading = "; ".join([tables.READING, *(notes[x] for x in rows[0] if x in notes)])
        advice = f"Advice: {'leave it as it is' if self.keeps else self.advice.name}"
        return tables.page(
            self.title,
            predictions_table(named),
            self._knee_table(),
            f"{tables.aligned(rows)}\n{tables.rest(len(self.layers))}",
            textwrap.fill(reading, tables.WIDTH),
            tables.context_note(self.length, self.context),
            "\n".join([advice, *(f"  {reason}" for reason in self.advice.reasons)]),
        )

    def _layer_rows(self) -> list[list[str]]:
        layers = self.layers.values()
        kneed = any(layer.beyond_q or layer.beyond_k for layer in layers)
        bounded = any(layer.bound is not None for layer in layers)
        gained = any((layer.gain_q, layer.gain_k) != (None, None) for layer in layers)
        optional = ["gains q, k"] * gained + ["bound"] * bounded + ["beyond q, k"] * kneed
        over, risks = tables.over_names(self.cap), self.risks
        rows = [["layer", "", "max |logit|", "head", "entropy", "head", *over, "rms q", "rms k", *optional]]
        for risk in risks[: tables.ROWS]:
            layer = self.layers[risk.layer]
            row = [risk.layer, risk.level, f"{risk.max_logit:.1f}", str(risk.max_head)]
            row += [f"{risk.entropy:.2f}", str(risk.entropy_head)]
            row += [f"{tables.mean(shares):.2%}" for shares in (layer.over_half, layer.over_cap)]
            row += ["-" if x is None else f"{tables.mean(x):.3g}" for x in (layer.rms_q, layer.rms_k)]
            row += [", ".join("-" if g is None else f"{g:.3g}" for g in (layer.gain_q, layer.gain_k))] * gained
            row += [tables.bound_cell(layer.bound)] * bounded
            rows.append(row + [tables.pair_of_means(layer.beyond_q, layer.beyond_k, ".2%")] * kneed)
        return rows

    def _knee_table(self) -> str:
        knees = self.knees
        if knees is None:
            return ""
        rows = [["knee", "loss rises by", "KL", "bound on |logit|", ""]]
        for trial in knees.trials:
            note = f"← chosen, with a margin over the smallest at most {knees.limit:.3f}" * (trial is knees.chosen)
            rows.append(
                [f"{trial.knee:.3g}", f"{trial.rise:+.3f}", f"{trial.kl:.3f}", tables.bound_cell(trial.bound), note]
            )
        reading = (
            f"{scheme_name(knees.scheme)}, calibrated and judged on an eighth of the sequences, by knee\n"
            f"(largest |logit| seen unpatched: {self.largest:.1f}; fresh gains and no knee: {knees.jump:+.3f}):"
        )
        return f"{reading}\n\n{tables.aligned(rows)}"

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready data."""
        trials = [{"scheme": scheme, "prediction": found} for scheme, found in self.trials.items()]
        chosen = {"chosen_knee": self.knees.chosen.knee} if self.knees and self.knees.chosen else {}
        return to_json({"format": FORMAT, **vars(self), "trials": trials, "risks": self.risks, **chosen})

    def save(self, path: str | Path) -> None:
        """Write the fields as a JSON file, whole or not at all."""
        save_json(self.to_dict(), Path(path))
