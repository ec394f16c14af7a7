"""The result of `inspect_model`, as text, as HTML and as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_qknorm.inspection.advice import Advice, scheme_name
from hf_qknorm.inspection.measurements import KneeTrials, Risk
from hf_qknorm.reports.html import page_html
from hf_qknorm.reports.records import FORMAT, LayerStatistics, Prediction, predictions_table, to_json
from hf_qknorm.reports.report import save_json
from hf_qknorm.reports.tables import (
    BOUND,
    GAINS,
    READING,
    ROWS,
    WIDTH,
    Page,
    Points,
    Table,
    bound_cell,
    context_note,
    mean,
    over_names,
    page_text,
    pair_of_means,
    rest,
)
from hf_qknorm.scheme import SCHEMES, Scheme


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect_model`: `layers` by name, `risks` by layer (highest first), and the `advice`.

    `base` is the prediction of the unpatched model, `patched` that of a patched model as it is (None if it is
    unpatched). Both are None without a language-modelling head. `trials` are predictions with schemes with fresh gains,
    before any calibration. `knees` are loss and bound at each knee that `calibrate` tries (None for a model that is
    patched, takes no norms, or predicts no tokens). `scheme` is the model's (None if it is unpatched), `bounds` the
    largest |logit| for any input, by layer, where norms bound it, and `gains` the largest |gain| of the norms of
    queries and of keys, by layer; the norms are the scheme's or the model's own. Shares of large logits are relative to
    `cap`. `even` is the entropy (nats) of even attention, by layer. `length` is that of the longest
    sequence of the text, `context` the longest that the model is for (None where unknown).

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
    scheme: Scheme | None
    base: Prediction | None
    patched: Prediction | None
    trials: Mapping[Scheme, Prediction]
    layers: Mapping[str, LayerStatistics]
    even: Mapping[str, float]
    risks: tuple[Risk, ...]
    advice: Advice
    knees: KneeTrials | None = None
    bounds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    gains: Mapping[str, tuple[float | None, float | None]] = dataclasses.field(default_factory=dict)
    context: int | None = None

    @property
    def largest(self) -> float:
        """The largest |logit| of all heads."""
        return self.risks[0].max_logit

    @property
    def keeps(self) -> bool:
        """Whether the advice is to leave the model as it is."""
        return self.advice.scheme == (self.scheme or SCHEMES["none"])

    def table(self) -> str:
        """The measurements, the layers at the highest risk, and the advice, as a page of text."""
        return page_text(self._page())

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return page_html(self._page())

    def _page(self) -> Page:
        heads = len(next(iter(self.layers.values())).max_logit)
        state = "unpatched" if self.scheme is None else str(self.scheme)
        title = (
            f"{self.model}: {self.model_type}, {len(self.layers)} layers of {heads} heads, {state}; "
            f"{self.tokens:,} tokens in sequences of up to {self.length}"
        )
        named = {"unpatched": self.base, "as it is": self.patched}
        named |= {scheme_name(scheme) + ", fresh gains" * bool(scheme.norms): p for scheme, p in self.trials.items()}
        predicted = predictions_table(named)
        reading = "; ".join([READING, *[GAINS] * bool(self.gains), *[BOUND] * bool(self.bounds)])
        reading = textwrap.fill(reading, WIDTH)
        advice = Points(f"Advice: {'leave it as it is' if self.keeps else self.advice.name}", self.advice.reasons)
        note = context_note(self.length, self.context)
        return (title, predicted, *self._knee_table(), self._layer_table(), reading, note, advice)

    def _layer_table(self) -> Table:
        bounded, kneed = bool(self.bounds), self.scheme is not None and bool(self.scheme.knee)
        optional = ["gains q, k"] * bool(self.gains) + ["bound"] * bounded + ["beyond q, k"] * kneed
        over = over_names(self.cap)
        rows = [["layer", "", "max |logit|", "head", "entropy", "head", *over, "rms q", "rms k", *optional]]
        for risk in self.risks[:ROWS]:
            layer = self.layers[risk.layer]
            row = [risk.layer, risk.level, f"{risk.max_logit:.1f}", str(risk.max_head)]
            row += [f"{risk.entropy:.2f}", str(risk.entropy_head)]
            row += [f"{mean(shares):.2%}" for shares in (layer.over_half, layer.over_cap)]
            row += ["-" if x is None else f"{mean(x):.3g}" for x in (layer.rms_q, layer.rms_k)]
            if self.gains:
                row.append(
                    ", ".join("-" if g is None else f"{g:.3g}" for g in self.gains.get(risk.layer, (None, None)))
                )
            row += [bound_cell(self.bounds.get(risk.layer))] * bounded
            rows.append(row + [pair_of_means(layer.beyond_q, layer.beyond_k, ".2%")] * kneed)
        return Table(rows, rest(len(self.risks)))

    def _knee_table(self) -> Page:
        knees = self.knees
        if knees is None:
            return ()
        rows = [["knee", "loss rises by", "KL", "bound on |logit|", ""]]
        for trial in knees.trials:
            note = f"← chosen, with a margin over the smallest at most {knees.limit:.3f}" * (trial is knees.chosen)
            rows.append([f"{trial.knee:g}", f"{trial.rise:+.3f}", f"{trial.kl:.3f}", bound_cell(trial.bound), note])
        reading = (
            f"{scheme_name(knees.scheme)}, calibrated and judged on an eighth of the sequences, by knee\n"
            f"(largest |logit| seen unpatched: {self.largest:.1f}; fresh gains and no knee: {knees.jump:+.3f}):"
        )
        return (reading, Table(rows))

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready data."""
        trials = [{"scheme": scheme, **p.to_dict()} for scheme, p in self.trials.items()]
        return to_json({"format": FORMAT, **vars(self), "trials": trials})

    def save(self, path: str | Path) -> None:
        """Write the fields as a JSON file, whole or not at all."""
        save_json(self.to_dict(), Path(path))
