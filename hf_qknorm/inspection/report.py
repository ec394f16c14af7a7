"""An inspection: a model's numbers, what schemes and knees would do to it, and advice; as text and as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hf_qknorm.reports import tables
from hf_qknorm.reports.records import FORMAT, LayerStatistics, Prediction, largest_bound, predictions_table, to_json
from hf_qknorm.reports.report import save_json
from hf_qknorm.scheme import SCHEMES, Scheme

LEVELS: Final = ("calm", "raised", "large", "runaway")  # |logit| up to half the cap, the cap, twice the cap, above


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
    """The knees tried with a `scheme`, in ascending order. `limit` is the cost that `calibrate` accepts by default."""

    scheme: Scheme
    limit: float
    trials: tuple[KneeTrial, ...]

    @property
    def chosen(self) -> KneeTrial | None:
        """The trial of the knee that `calibrate` sets, with a margin; None if all cost more than the limit."""
        least = next((i for i, each in enumerate(self.trials) if each.cost <= self.limit), None)
        return None if least is None else self.trials[min(least + bool(self.trials[least].knee), len(self.trials) - 1)]


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
    """The result of `inspect_model`: `layers` by name, in the model's order, and the `advice`.

    `base` is the prediction of the unpatched model, `patched` the prediction of a patched model as it is (None if it is
    unpatched). Both are None without a language-modelling head. `trials` are predictions with schemes, by their names,
    with fresh gains, before any calibration. `knees` are loss and bound at each knee that was tried (None for a model
    that is patched, takes no norms, or predicts no tokens). `scheme` is the model's (None if it is unpatched). Shares
    of large logits are relative to `cap`; `own_cap` is the cap in force. `normed` is whether queries and keys both have
    norms, of the scheme or of the model itself, `latent` whether a latent is cached in place of keys. `length` is the
    length of the longest sequence of the text, `context` the longest that the model is for (None where unknown).

    >>> found = qk.inspect_model(model, texts)
    >>> found.largest == max(found.ranked[0][1].max_logit)
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
    trials: Mapping[str, Prediction] = dataclasses.field(default_factory=dict)
    knees: KneeTrials | None = None
    advice: Advice = Advice(SCHEMES["none"], ())
    normed: bool = False
    latent: bool = False
    own_cap: float | None = None
    context: int | None = None

    @property
    def ranked(self) -> list[tuple[str, LayerStatistics]]:
        """The layers and their names, those with the largest |logit| first: training diverges at large logits."""
        return sorted(self.layers.items(), key=lambda item: -max(item[1].max_logit))

    @property
    def largest(self) -> float:
        """The largest |logit| of all heads."""
        return max(self.ranked[0][1].max_logit)

    @property
    def bound(self) -> float | None:
        """The largest |logit| that norms let any input have, in the worst layer; None without a bound."""
        return largest_bound(layer.bound for layer in self.layers.values())

    @property
    def present(self) -> Scheme:
        """The model's scheme, "none" if it is unpatched."""
        return self.scheme or SCHEMES["none"]

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
        """The measurements, the layers with the largest logits, and the advice, as a page of text."""
        named = {"unpatched": self.base, "as it is": self.patched}
        named |= {name + ", fresh gains" * ("norm" in name): trial for name, trial in self.trials.items()}
        bounded = any(layer.bound is not None for layer in self.layers.values())
        rows = [["layer", "", "max |logit|", "head", "entropy", "head"]]
        rows[0] += [f"> {self.cap / 2:g}", f"> {self.cap:g}"]
        rows[0] += ["bound"] * bounded
        for name, layer in self.ranked[: tables.ROWS]:
            largest, sharpest = max(layer.max_logit), min(layer.entropy)
            row = [name, LEVELS[sum(largest > factor * self.cap for factor in (0.5, 1, 2))]]
            row += [f"{largest:.1f}", str(layer.max_logit.index(largest))]
            row += [f"{sharpest:.2f}", str(layer.entropy.index(sharpest))]
            row += [f"{tables.mean(shares):.2%}" for shares in (layer.over_half, layer.over_cap)]
            rows.append(row + [tables.bound_cell(layer.bound)] * bounded)
        advice = f"Advice, if logits grow in training: {self.advice.name}"
        if self.advice.scheme == self.present:
            advice = "Advice: leave it as it is"
        return tables.page(
            self.title,
            predictions_table(named),
            self._knee_table(),
            f"{tables.aligned(rows)}\n{tables.rest(len(self.layers))}",
            textwrap.fill("; ".join([tables.READING, *[tables.BOUND] * bounded]), tables.WIDTH),
            tables.context_note(self.length, self.context),
            "\n".join([advice, *(f"  {reason}" for reason in self.advice.reasons)]),
        )

    def _knee_table(self) -> str:
        knees = self.knees
        if knees is None:
            return ""
        rows = [["knee", "loss rises by", "KL", "bound on |logit|", ""]]
        for trial in knees.trials:
            note = f"← chosen, with a margin over the smallest at most {knees.limit:.3f}" * (trial is knees.chosen)
            numbers = [f"{trial.knee:.3g}", f"{trial.rise:+.3f}", f"{trial.kl:.3f}", tables.bound_cell(trial.bound)]
            rows.append([*numbers, note])
        return (
            f"{scheme_name(knees.scheme)}, calibrated and judged on an eighth of the sequences, by knee\n"
            f"(largest |logit| seen unpatched: {self.largest:.1f}):\n\n{tables.aligned(rows)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready data."""
        chosen = {"chosen_knee": self.knees.chosen.knee} if self.knees and self.knees.chosen else {}
        return to_json({"format": FORMAT, **vars(self), **chosen})

    def save(self, path: str | Path) -> None:
        """Write the fields as a JSON file, whole or not at all."""
        save_json(self.to_dict(), Path(path))
