"""The report of a calibration or a measurement: predictions, and logits and gains by layer; to and from JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hf_qknorm.files.atomic_io import replace_text
from hf_qknorm.files.formatting import format_fixed, shorten
from hf_qknorm.files.hub_names import check_optional_repo_id
from hf_qknorm.files.untrusted import check_keys, check_number, check_positive, read_json
from hf_qknorm.ops.norms import shown_knee
from hf_qknorm.reports import records, tables
from hf_qknorm.reports.records import LayerReport, LayerStatistics, Prediction
from hf_qknorm.scheme import Scheme

MEASURED = "measured"  # the method of a report on the patched model alone
KNEES = 1_000  # limit on the knees in a report
TENSOR_NAME = 500  # characters
TENSORS = 1_000_000  # limit on the tensors that it has digests of
OMITTED = ("knees", "stale", "weights", "length", "context", "output_error")  # from JSON where they are empty


@dataclass(frozen=True)
class Calibration:
    """The effect of a calibration on a model's predictions and logits, measured on the first batches of its data.

    `base` is the `Prediction` of the unpatched model, `ones` with fresh gains, `chosen` with the calibrated gains; all
    three are None for a model without a language-modelling head. Losses are in nats per token. `layers` has the
    `LayerReport` of every attention layer by name; its shares of large logits are relative to `cap`. `tokens` is the
    number of tokens of the data, `judged` the number of them that all this was measured on, in sequences of up to
    `length`; `context` is the longest sequence that the model is for (None where unknown). `base_model` and `dataset`
    are the Hub names of the model and the text, None for local ones. `knees` has the prediction with each knee that was
    tried; the norms' own is `knee`, 0 for plain ones, and their sharpness is `sharpness`. `output_error` is the
    relative error of the last hidden states, for a model without a language-modelling head; of an encoder of images
    `tokens` and `judged` count images, and `length` is None.

    The method "measured" stands for a measurement of the patched model alone, as after training: `base`, `ones` and
    all else that describes the unpatched model are None. `weights` has digests of the measured weights by tensor
    (`hf_qknorm.model.record`). `stale` is whether the model beside the report has other weights, or another scheme.

        >>> report = qk.calibrate(qk.patch_model(model, "qk_norm"), texts)
        >>> report.save("report.json")
        >>> qk.Calibration.load("report.json") == report
        True
        >>> next(iter(report.layers))
        'model.layers.0.self_attn'
    """

    method: str
    tokens: int
    scheme: Scheme
    cap: float
    base: Prediction | None
    ones: Prediction | None
    chosen: Prediction | None
    layers: Mapping[str, LayerReport]
    judged: int | None = None
    base_model: str | None = None
    dataset: str | None = None
    knees: Mapping[float, Prediction] = dataclasses.field(default_factory=dict)
    knee: float = 0.0
    sharpness: float = 1.0
    stale: bool = False
    weights: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    length: int | None = dataclasses.field(default=None, repr=False)
    context: int | None = dataclasses.field(default=None, repr=False)
    output_error: float | None = None

    @property
    def base_loss(self) -> float | None:
        """The loss of the unpatched model, in nats per token."""
        return None if self.base is None else self.base.loss

    @property
    def fresh_loss(self) -> float | None:
        """The loss with fresh gains."""
        return None if self.ones is None else self.ones.loss

    @property
    def loss(self) -> float | None:
        """The loss with the calibrated gains."""
        return None if self.chosen is None else self.chosen.loss

    @property
    def kl(self) -> float | None:
        """KL(unpatched ‖ calibrated) of the next-token distributions, in nats per token."""
        return None if self.chosen is None else self.chosen.kl

    @property
    def title(self) -> str:
        """The method, the knee and its sharpness."""
        sharp = f", sharpness {self.sharpness:g}" if self.sharpness > 1 else ""
        return self.method + (f", knee {self.shown_knee}{sharp}" if self.knee else "")

    @property
    def shown_knee(self) -> str:
        """The knee as text."""
        return shown_knee(self.knee)

    @property
    def bound(self) -> float | None:
        """The largest bound on the logits of a layer, before any cap; None if a layer has none."""
        return records.largest_bound(layer.bound for layer in self.layers.values())

    @property
    def kept(self) -> float | None:
        """The share of the rise in loss with fresh gains that the calibration removed; None without a rise."""
        if self.base is None or self.ones is None or self.chosen is None or self.ones.loss <= self.base.loss:
            return None
        share = (self.ones.loss - self.chosen.loss) / (self.ones.loss - self.base.loss)
        return share if math.isfinite(share) else None

    def __str__(self) -> str:
        bound = "" if self.bound is None else f"; |logit| ≤ {format_fixed(self.bound, 1)} for any input"
        if self.method == MEASURED:
            loss = "" if self.chosen is None else f"loss {self.chosen.loss:.3f} "
            return f"{self.title}: {loss}on {self.tokens:,} tokens{bound}"
        if self.base is None or self.ones is None or self.chosen is None:
            error = "" if self.output_error is None else f"; hidden states change by {self.output_error:.2%}"
            images = self.length is None and self.output_error is not None
            return f"{self.title}: gains from {self.tokens:,} {'images' if images else 'tokens'}{error}{bound}"
        kept = "" if self.kept is None else f" ({self.kept:.1%} of the jump removed)"
        return (
            f"{self.title}: loss {self.base.loss:.3f} unpatched, {self.ones.loss:.3f} with fresh gains, "
            f"{self.chosen.loss:.3f} calibrated on {self.tokens:,} tokens{kept}; KL {self.chosen.kl:.4f}{bound}"
        )

    def table(self) -> str:
        """A text of up to 120 columns with the predictions and the layers with the largest logits."""
        return tables.page_text(self._page())

    def _repr_html_(self) -> str:
        return tables.page_html(self._page() if self.method == MEASURED else (*self._page(), str(self)))

    def _page(self) -> tables.Page:
        predictions = {"unpatched": self.base, "fresh gains": self.ones, self.title: self.chosen}
        alone = self.method == MEASURED
        layers = sorted(self.layers.items(), key=lambda item: -max(item[1].after.max_logit))
        beyond = ["beyond q, k"] if self.knee else []
        over_half, _ = tables.over_names(self.cap)
        rows = [["layer", "max |logit|", "bound", "entropy", over_half, "rms q, k", *beyond, "gain q, k"]]
        for name, layer in layers[: tables.ROWS]:
            seen = [side for side in (layer.before, layer.after) if side is not None]
            logit, *others = (" → ".join(sides) for sides in zip(*map(_cells, seen), strict=True))
            pairs = [tables.pair_of_means(seen[0].rms_q, seen[0].rms_k)]
            pairs += [tables.pair_of_means(layer.after.beyond_q, layer.after.beyond_k, ".2%")] * len(beyond)
            pairs += [tables.pair_of_means(layer.gain_q, layer.gain_k)]
            rows.append([name, logit, tables.bound_cell(layer.bound), *others, *pairs])
        knees = ", ".join(f"{knee:.3g}: {p.loss:.3f}, {p.kl:.4f}" for knee, p in self.knees.items())
        sides = [] if alone else ["Before → after"]
        reading = "; ".join([*sides, tables.BOUND, *([tables.BEYOND] if beyond else [])])
        return (
            f"{self.method} on {self.tokens:,} tokens: {self.scheme}",
            str(self) if alone else records.predictions_table(predictions),
            f"loss, KL by knee: {knees}" if knees else "",
            tables.Table(rows, tables.rest(len(layers))),
            f"{reading};\n{tables.READING}.",
            tables.context_note(self.length, self.context),
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data, for `Calibration.from_dict`."""
        knees = [{"knee": knee, **p.to_dict()} for knee, p in self.knees.items()]
        data = {"format": records.FORMAT, **vars(self), "knees": knees}
        return records.to_json({key: value for key, value in data.items() if value or key not in OMITTED})

    @classmethod
    def from_dict(cls, data: Any) -> Calibration:
        """The inverse of `to_dict`. Raises ValueError, naming the key, for anything else."""
        readers: dict[str, Any] = dict.fromkeys(("base_model", "dataset"), check_optional_repo_id)
        readers |= {"cap": check_positive, "layers": partial(records.read_layers, record=LayerReport), "knees": _knees}
        readers |= {"scheme": lambda value, _: Scheme.from_dict(value), "weights": _digests, "stale": _flag}
        report = cls(**records.read_fields(data, cls, "report", versioned=True, **readers))
        _check_sides(report)
        return report

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a report from a file. Raises ValueError, naming the file, if it is too large or not a report."""
        try:
            return cls.from_dict(read_json(Path(path)))
        except ValueError as error:
            raise ValueError(error if str(path) in str(error) else f"{path}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the report as JSON; a failed run leaves the old file."""
        save_json(self.to_dict(), Path(path))


def save_json(data: Mapping[str, Any], path: Path) -> None:
    """Write `data` as indented JSON; a failed run leaves the old file."""
    replace_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def _knees(value: Any, where: str) -> dict[float, Prediction]:
    if not isinstance(value, list | tuple) or len(value) > KNEES:
        raise ValueError(f"{where} is {shorten(value)}, expected a list of at most {KNEES} predictions by knee")
    found = {}
    for i, item in enumerate(value):
        check_keys(item, ("knee", "loss", "perplexity", "kl", "agreement"), f"{where}[{i}]")
        knee = check_number(item["knee"], f"{where}[{i}].knee")
        if not (math.isfinite(knee) and knee >= 0):
            raise ValueError(f"{where}[{i}].knee is {knee}, expected a finite number ≥ 0")
        found[knee] = Prediction.from_dict({key: x for key, x in item.items() if key != "knee"}, f"{where}[{i}]")
    return found


def _digests(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > TENSORS:
        raise ValueError(f"{where} is {shorten(value)}, expected a mapping from the names of tensors to digests")
    for name, digests in value.items():
        if not 0 < len(name) <= TENSOR_NAME or not name.isprintable():
            raise ValueError(f"a name in {where} is {shorten(name)}, expected a tensor's name")
        if not isinstance(digests, str) or not 0 < len(digests) <= 80 or set(digests) - set("0123456789abcdef "):
            raise ValueError(f"{where}.{shorten(name)} is {shorten(digests)}, expected digests")
    return value


def _check_sides(report: Calibration) -> None:
    """Raise ValueError unless a report has either all numbers of the unpatched model or, by its method, none."""
    compared = report.method != MEASURED
    predicted = compared and report.chosen is not None
    sides: dict[str, tuple[Any, bool]] = {"base": (report.base, predicted), "ones": (report.ones, predicted)}
    sides |= {f"layers.{name}.before": (layer.before, compared) for name, layer in report.layers.items()}
    for name, (side, expected) in sides.items():
        if (side is not None) != expected:
            found, wanted = ("null", "numbers") if expected else ("not null", "null")
            raise ValueError(f"report.{name} is {found}, expected {wanted} with the method {report.method!r}")


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{where} is {shorten(value)}, expected true or false")
    return value


def _cells(layer: LayerStatistics) -> list[str]:
    return [f"{max(layer.max_logit):.1f}", f"{min(layer.entropy):.2f}", f"{tables.mean(layer.over_half):.2%}"]
