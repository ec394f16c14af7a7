"""The report of a calibration: predictions, and logits and gains by layer; to and from JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field, PlainSerializer, PlainValidator, TypeAdapter

from hf_qknorm.files.atomic_io import replace_text
from hf_qknorm.files.formatting import format_fixed
from hf_qknorm.files.paths import check_repo_id, user_path
from hf_qknorm.files.untrusted import read_bytes
from hf_qknorm.norms import shown_knee
from hf_qknorm.reports import records, tables
from hf_qknorm.reports.records import Count, LayerReport, Name, Prediction
from hf_qknorm.scheme import Scheme

HubName = Annotated[str, AfterValidator(lambda name: check_repo_id(name, "it"))] | None
Size = Annotated[float, Field(gt=0, allow_inf_nan=False)]
KneeSize = Annotated[float, Field(ge=0, allow_inf_nan=False)]
SchemeField = Annotated[
    Scheme,
    PlainValidator(lambda x: x if isinstance(x, Scheme) else Scheme.from_dict(x)),
    PlainSerializer(lambda scheme: scheme.to_dict()),
]


@dataclass(frozen=True)
class Calibration:
    """The effect of a calibration on a model's predictions and logits, measured on a part of its data.

    `base` is the `Prediction` of the unpatched model, `ones` with fresh gains, `chosen` with the calibrated gains; all
    three are None for a model without a language-modelling head. Losses are in nats per token. `layers` has the
    `LayerReport` of every attention layer by name; its shares of large logits are relative to `cap`. `tokens` is the
    number of tokens of the data, `judged` the number of them that all this was measured on, in sequences of up to
    `length`; `context` is the longest sequence that the model is for (None where unknown). `base_model` is the Hub
    name of the model, None for a local one. `knees` has the prediction with each knee that was tried; the norms' own is
    `knee`, 0 for plain ones, and their sharpness is `sharpness`. `output_error` is the relative error of the last
    hidden states, for a model without a language-modelling head; of an encoder of images `tokens` and `judged` count
    images, and `length` is None.

    Training that follows does not change these numbers.

        >>> report = qk.calibrate(qk.patch_model(model, "qk_norm"), texts)
        >>> report.save("report.json")
        >>> qk.Calibration.load("report.json") == report
        True
        >>> next(iter(report.layers))
        'model.layers.0.self_attn'
    """

    __pydantic_config__: ClassVar[ConfigDict] = records.STRICT

    tokens: Count
    scheme: SchemeField
    cap: Size
    base: Prediction | None
    ones: Prediction | None
    chosen: Prediction | None
    layers: Annotated[Mapping[Name, LayerReport], Field(min_length=1, max_length=10_000)]
    judged: Count | None = None
    base_model: HubName = None
    knees: Annotated[Mapping[KneeSize, Prediction], Field(max_length=1_000)] = field(default_factory=dict)
    knee: KneeSize = 0.0
    sharpness: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    length: Count | None = field(default=None, repr=False)
    context: Count | None = field(default=None, repr=False)
    output_error: float | None = None
    format: Literal[1] = field(default=records.FORMAT, repr=False, kw_only=True)

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
        """The knee, if any, and its sharpness."""
        sharp = f", sharpness {self.sharpness:g}" if self.sharpness > 1 else ""
        return "calibrated" + (f", knee {self.shown_knee}{sharp}" if self.knee else "")

    @property
    def shown_knee(self) -> str:
        """The knee as text."""
        return shown_knee(self.knee)

    @property
    def bound(self) -> float | None:
        """The largest bound on the logits of a layer, before any cap; None if a layer has none."""
        return records.largest_bound(layer.after.bound for layer in self.layers.values())

    def __str__(self) -> str:
        bound = "" if self.bound is None else f"; |logit| ≤ {format_fixed(self.bound, 1)} for any input, up to rounding"
        if self.base is None or self.ones is None or self.chosen is None:
            error = "" if self.output_error is None else f"; hidden states change by {self.output_error:.2%}"
            images = self.length is None and self.output_error is not None
            return f"{self.title}: gains from {self.tokens:,} {'images' if images else 'tokens'}{error}{bound}"
        return (
            f"{self.title}: loss {self.base.loss:.3f} unpatched, {self.ones.loss:.3f} with fresh gains, "
            f"{self.chosen.loss:.3f} with gains from {self.tokens:,} tokens; KL {self.chosen.kl:.4f}{bound}"
        )

    def table(self) -> str:
        """A text of up to 120 columns with the predictions and the layers with the largest logits."""
        tried = {f"knee {knee:.3g}": prediction for knee, prediction in self.knees.items()}
        predictions = {"unpatched": self.base, "fresh gains": self.ones, **tried, self.title: self.chosen}
        layers = {name: (layer.before, layer.after) for name, layer in self.layers.items()}
        return tables.page(
            f"calibrated on {self.tokens:,} tokens: {self.scheme}",
            tables.predictions_table(predictions),
            tables.layers_table(layers, self.cap),
            tables.context_note(self.length, self.context),
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data, for `Calibration.from_dict`: fields at their default are left out."""
        return {"format": self.format, **REPORT.dump_python(self, mode="json", exclude_defaults=True)}

    @classmethod
    def from_dict(cls, data: Any) -> Calibration:
        """The inverse of `to_dict`. Raises ValueError, naming the fields, for anything else."""
        try:
            text = json.dumps(data)
        except (RecursionError, TypeError) as error:
            raise ValueError(f"the report is no JSON data, or nested too deeply ({type(error).__name__})") from None
        return records.read_json(REPORT, text, "report")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a report from a file. Raises ValueError, naming the file, if it is too large or not a report."""
        return records.read_json(REPORT, read_bytes(user_path(path, "path")), str(path))

    def save(self, path: str | Path) -> None:
        """Write the report as JSON, in a new folder if need be; a failed run leaves the old file."""
        save_json(self.to_dict(), path)


REPORT = TypeAdapter(Calibration)


def save_json(data: Mapping[str, Any], path: str | Path) -> None:
    """Write `data` as indented JSON; a failed run leaves the old file."""
    replace_text(user_path(path, "path"), json.dumps(data, indent=2, ensure_ascii=False) + "\n")
