"""An inspection: a model's numbers, what schemes and knees would do to it, and advice; as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from hf_qknorm.reports import tables
from hf_qknorm.reports.records import FORMAT, LayerStatistics, Prediction, largest_bound
from hf_qknorm.reports.report import save_json
from hf_qknorm.scheme import SCHEMES, Scheme


@dataclass(frozen=True)
class Advice:
    """The scheme to use, and the reasons, at most four; the model's own scheme if nothing need be added."""

    scheme: Scheme
    reasons: tuple[str, ...]


def scheme_name(scheme: Scheme) -> str:
    """The scheme as a user would write it: the preset's name, or Python code."""
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
    with fresh gains, before any calibration. `knees` are those with `knee_scheme`, calibrated, at each knee that was
    tried (none for a model that is patched, takes no norms, or predicts no tokens); `knee` is the one that `calibrate`
    would set (None if all cost too much). `scheme` is the model's (None if it is unpatched). Shares
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
    knees: Mapping[float, Prediction] = dataclasses.field(default_factory=dict)
    knee: float | None = None
    knee_scheme: Scheme = SCHEMES["qk_norm"]
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
        """The predictions, the layers with the largest logits, and the advice, as a page of text."""
        named = {"unpatched": self.base, "as it is": self.patched}
        named |= {name + ", fresh gains" * ("norm" in name): trial for name, trial in self.trials.items()}
        for knee, trial in self.knees.items():
            named[f"{scheme_name(self.knee_scheme)}, knee {knee:.3g}{', chosen' * (knee == self.knee)}"] = trial
        advice = f"Advice, if logits grow in training: {scheme_name(self.advice.scheme)}"
        if self.advice.scheme == self.present:
            advice = "Advice: leave it as it is"
        return tables.page(
            self.title,
            tables.predictions_table(named),
            tables.layers_table({name: [layer] for name, layer in self.layers.items()}, self.cap),
            tables.context_note(self.length, self.context),
            "\n".join([advice, *(f"  {reason}" for reason in self.advice.reasons)]),
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready data, without those that are None."""
        return to_jsonable_python({"format": FORMAT, **vars(self)}, exclude_none=True)

    def save(self, path: str | Path) -> None:
        """Write the fields as a JSON file, whole or not at all, in a new folder if need be."""
        save_json(self.to_dict(), path)
