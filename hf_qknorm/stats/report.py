"""The effect of a conversion on a model: predictions and, layer by layer, logits and gains; from and to JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_qknorm.files.atomic_io import replace_text
from hf_qknorm.files.formatting import format_fixed, shorten
from hf_qknorm.files.hub_names import check_optional_repo_id
from hf_qknorm.files.untrusted import check_count, check_keys, check_number, check_positive, read_json
from hf_qknorm.scheme import Scheme
from hf_qknorm.stats.records import LayerReport, LayerStatistics, Prediction, field_names, predictions_table
from hf_qknorm.stats.tables import (
    BEYOND,
    BOUND,
    READING,
    ROWS,
    aligned,
    bound_cell,
    mean,
    over_names,
    pair_of_means,
    rest,
)

FORMAT = 1
LAYERS, KNEES = 10_000, 1_000  # more than any model has, or anyone tries
NAME = re.compile(r"[\w.]{1,200}", re.ASCII)  # of a layer, a module's path; and of a method


@dataclass(frozen=True)
class Calibration:
    """What a calibration did to a model's predictions and logits, over the first few batches of its data.

    `base` is the unpatched model, `ones` the scheme with fresh gains, `chosen` with the calibrated ones; all three are
    None for a model without a language-modelling head. `layers` has every attention layer by name; shares of large
    logits are relative to `cap`. `judged` says over how many of the `tokens` all this was measured. `base_model` and
    `dataset` are the Hub names of what was converted and of the text, None for what came from this machine. `knees` has
    the predictions with each knee that was tried; the one that was chosen is `scheme.knee`.
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

    @property
    def base_loss(self) -> float | None:
        """Mean next-token loss (nats) of the unpatched model."""
        return None if self.base is None else self.base.loss

    @property
    def fresh_loss(self) -> float | None:
        """The loss with fresh gains."""
        return None if self.ones is None else self.ones.loss

    @property
    def loss(self) -> float | None:
        """The loss with the chosen gains."""
        return None if self.chosen is None else self.chosen.loss

    @property
    def kl(self) -> float | None:
        """What is left between the unpatched model's next-token distribution and the calibrated one's, in nats."""
        return None if self.chosen is None else self.chosen.kl

    @property
    def title(self) -> str:
        """The method and the knee."""
        return self.method + (f", knee {self.scheme.knee:g}" if self.scheme.knee else "")

    @property
    def bound(self) -> float | None:
        """The largest bound on the logits of a layer, before any cap; None if a layer has none."""
        bounds = [layer.bound for layer in self.layers.values() if layer.bound is not None]
        return max(bounds) if bounds and len(bounds) == len(self.layers) else None

    @property
    def kept(self) -> float | None:
        """The share of the jump in loss that the calibration removed; None if there was no jump to remove."""
        if self.base is None or self.ones is None or self.chosen is None or self.ones.loss <= self.base.loss:
            return None
        share = (self.ones.loss - self.chosen.loss) / (self.ones.loss - self.base.loss)
        return share if math.isfinite(share) else None

    def __str__(self) -> str:
        bound = "" if self.bound is None else f"; |logit| ≤ {format_fixed(self.bound, 1)} for any input"
        if self.base is None or self.ones is None or self.chosen is None:
            return f"{self.title}: gains from {self.tokens:,} tokens{bound}"
        kept = "" if self.kept is None else f" ({self.kept:.1%} of the jump removed)"
        return (
            f"{self.title}: loss {self.base.loss:.3f} unpatched, {self.ones.loss:.3f} with fresh gains, "
            f"{self.chosen.loss:.3f} calibrated on {self.tokens:,} tokens{kept}; KL {self.chosen.kl:.4f}{bound}"
        )

    def table(self) -> str:
        """Predictions, and the layers with the largest logits: a few lines of text, up to 120 wide."""
        return _table(self)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data; `Calibration.from_dict` gives it back."""
        predictions = {"base": self.base, "ones": self.ones, "chosen": self.chosen}
        return {
            "format": FORMAT,
            "method": self.method,
            "tokens": self.tokens,
            "scheme": self.scheme.to_dict(),
            "cap": self.cap,
            "judged": self.judged,
            "base_model": self.base_model,
            "dataset": self.dataset,
            **{name: None if made is None else made.to_dict() for name, made in predictions.items()},
            "layers": {name: layer.to_dict() for name, layer in self.layers.items()},
            **({"knees": [{"knee": knee, **p.to_dict()} for knee, p in self.knees.items()]} if self.knees else {}),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Calibration:
        """The report that `to_dict` wrote. Raises ValueError, naming the key, for anything else."""
        required, optional = field_names(cls)
        check_keys(data, ("format", *required), "report", optional)
        if data["format"] != FORMAT:
            raise ValueError(
                f"report.format is {shorten(data['format'])}, expected {FORMAT}: another hf_qknorm wrote it"
            )
        if not isinstance(data["layers"], Mapping) or len(data["layers"]) > LAYERS:
            raise ValueError(
                f"report.layers is {shorten(data['layers'])}, expected a mapping from at most {LAYERS:,} layers' names"
            )
        base, ones, chosen = (
            None if data[key] is None else Prediction.from_dict(data[key], f"report.{key}")
            for key in ("base", "ones", "chosen")
        )
        layers = {
            _named(name, "a name in report.layers", "a module's path"): LayerReport.from_dict(
                x, f"report.layers.{name}"
            )
            for name, x in data["layers"].items()
        }
        return cls(
            method=_named(data["method"], "report.method", "a name"),
            tokens=check_count(data["tokens"], "report.tokens"),
            scheme=Scheme.from_dict(data["scheme"]),
            cap=check_positive(data["cap"], "report.cap"),
            base=base,
            ones=ones,
            chosen=chosen,
            layers=layers,
            judged=None if data.get("judged") is None else check_count(data["judged"], "report.judged"),
            base_model=check_optional_repo_id(data.get("base_model"), "report.base_model"),
            dataset=check_optional_repo_id(data.get("dataset"), "report.dataset"),
            knees=_knees(data.get("knees", [])),
        )

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """The report in a file. Raises ValueError, naming the file, for one that is too large or no report."""
        try:
            return cls.from_dict(read_json(Path(path)))
        except ValueError as error:
            raise ValueError(error if str(path) in str(error) else f"{path}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the report as JSON, whole or not at all."""
        save_json(self.to_dict(), Path(path))


def save_json(data: Mapping[str, Any], path: Path) -> None:
    """Write `data`, whole or not at all."""
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    replace_text(path, text)


def _knees(value: Any) -> dict[float, Prediction]:
    if not isinstance(value, list | tuple) or len(value) > KNEES:
        raise ValueError(f"report.knees is {shorten(value)}, expected a list of at most {KNEES} predictions by knee")
    found = {}
    for i, item in enumerate(value):
        where = f"report.knees[{i}]"
        if not isinstance(item, Mapping) or "knee" not in item:
            raise ValueError(f"{where} is {shorten(item)}, expected a mapping with a knee and its predictions")
        knee = check_number(item["knee"], f"{where}.knee")
        if not (math.isfinite(knee) and knee >= 0):
            raise ValueError(f"{where}.knee is {knee}, expected a finite number ≥ 0")
        found[knee] = Prediction.from_dict({key: x for key, x in item.items() if key != "knee"}, where)
    return found


def _named(value: Any, where: str, what: str) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError(f"{where} is {shorten(value)}, expected {what}: letters, digits, _ and .")
    return value


def _table(report: Calibration) -> str:
    """Predictions, and the layers with the largest logits: a few lines of text, up to 120 wide."""
    named = {"unpatched": report.base, "fresh gains": report.ones}
    named[report.title] = report.chosen
    worst = sorted(report.layers.items(), key=lambda item: -max(item[1].after.max_logit))
    beyond = ["beyond q, k"] if report.scheme.knee else []
    rows = [["layer", "max |logit|", "bound", "entropy", over_names(report.cap)[0], "rms q, k", *beyond, "gain q, k"]]
    for name, layer in worst[:ROWS]:
        largest, *others = (" → ".join(pair) for pair in zip(*map(_cells, (layer.before, layer.after)), strict=True))
        rows.append([name, largest, bound_cell(layer.bound), *others])
        rows[-1].append(pair_of_means(layer.before.rms_q, layer.before.rms_k))
        rows[-1] += [pair_of_means(layer.beyond_q, layer.beyond_k, ".2%")] * len(beyond)
        rows[-1].append(pair_of_means(layer.gain_q, layer.gain_k))
    reading = "; ".join([f"Before → after; {BOUND}", *([BEYOND] if beyond else [])])
    parts = (
        f"{report.method} on {report.tokens:,} tokens: {report.scheme}",
        predictions_table({name: found for name, found in named.items() if found is not None}),
        "loss, KL by knee: " + ", ".join(f"{knee:g}: {p.loss:.3f}, {p.kl:.4f}" for knee, p in report.knees.items())
        if report.knees
        else "",
        aligned(rows) + rest(len(worst)),
        f"{reading};\n{READING}.",
    )
    return "\n\n".join(part for part in parts if part)


def _cells(layer: LayerStatistics) -> list[str]:
    return [f"{max(layer.max_logit):.1f}", f"{min(layer.entropy):.2f}", f"{mean(layer.over_half):.2%}"]
