"""The effect of a conversion on a model: predictions and, layer by layer, logits and gains; from and to JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_qknorm.convert.tables import calibration_table
from hf_qknorm.files import replace_text
from hf_qknorm.scheme import Scheme
from hf_qknorm.strangers import brief, check_keys, count, fixed, number, positive, read_json, repo_id

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FORMAT = 1
LAYERS, HEADS, KNEES = 10_000, 10_000, 1_000  # more than any model has, or anyone tries
NAME = re.compile(r"[\w.]{1,200}", re.ASCII)  # of a layer, a module's path; and of a method

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Prediction:
    """How well next tokens are predicted: mean `loss` in nats a token, and how far from the unpatched model.

    `kl` is KL(unpatched ‖ this) in nats a token, `agreement` the share of tokens whose likeliest successor is the
    unpatched model's; that model itself has 0 and 1.
    """

    loss: float
    kl: float = 0.0
    agreement: float = 1.0

    @property
    def perplexity(self) -> float:
        """e to the loss."""
        return math.exp(min(self.loss, 700.0))  # beyond, a float has no room

    def to_dict(self) -> dict[str, float]:
        """The numbers, the perplexity among them."""
        return {"loss": self.loss, "perplexity": self.perplexity, "kl": self.kl, "agreement": self.agreement}

    @classmethod
    def from_dict(cls, data: Any, where: str = "prediction") -> Prediction:
        """What `to_dict` wrote. Raises ValueError, naming the key, for anything else."""
        check_keys(data, ("loss", "perplexity", "kl", "agreement"), where)
        numbers = {key: number(value, f"{where}.{key}") for key, value in data.items()}
        return cls(numbers["loss"], numbers["kl"], numbers["agreement"])


@dataclass(frozen=True)
class LayerStatistics:
    """A layer's attention, a number a head: `LogitStatistics` at rest. `rms_k` has one for each key head.

    `beyond_q` and `beyond_k` are the shares of queries and keys beyond the knee of their norm; None without a knee.
    """

    max_logit: Numbers
    entropy: Numbers
    over_half: Numbers
    over_cap: Numbers
    rms_q: Numbers
    rms_k: Numbers
    beyond_q: Numbers | None = None
    beyond_k: Numbers | None = None

    def to_dict(self) -> dict[str, list[float]]:
        """The numbers by name, without those that are None."""
        numbers = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: list(values) for name, values in numbers.items() if values is not None}

    @classmethod
    def from_dict(cls, data: Any, where: str = "statistics") -> LayerStatistics:
        """The statistics that `to_dict` wrote. Raises ValueError, naming the key, for anything else."""
        required, optional = _names(cls)
        check_keys(data, required, where, optional)
        return cls(**{name: _numbers(values, f"{where}.{name}") for name, values in data.items()})


@dataclass(frozen=True)
class LayerReport:
    """A layer unpatched and as it is now, and the root mean square of each head's gain (None: no gain there).

    `bound` is the largest |logit|, before any cap, that any input can give now (`convert.bounds.logit_bound`); None
    where the scheme does not norm both queries and keys.
    """

    before: LayerStatistics
    after: LayerStatistics
    gain_q: Numbers | None = None
    gain_k: Numbers | None = None
    bound: float | None = None

    @property
    def beyond_q(self) -> Numbers | None:
        """The share of queries beyond the knee, a number a head; None without a knee."""
        return self.after.beyond_q

    @property
    def beyond_k(self) -> Numbers | None:
        """The share of keys beyond the knee, a number a key head; None without a knee."""
        return self.after.beyond_k

    def to_dict(self) -> dict[str, Any]:
        """The numbers by name; a bound only where there is one."""
        gains = {name: None if gain is None else list(gain) for name, gain in self._gains()}
        bound = {} if self.bound is None else {"bound": self.bound}
        return {"before": self.before.to_dict(), "after": self.after.to_dict(), **gains, **bound}

    def _gains(self) -> list[tuple[str, Numbers | None]]:
        return [("gain_q", self.gain_q), ("gain_k", self.gain_k)]

    @classmethod
    def from_dict(cls, data: Any, where: str = "layer") -> LayerReport:
        """The layer that `to_dict` wrote. Raises ValueError, naming the key, for anything else."""
        check_keys(data, ("before", "after", "gain_q", "gain_k"), where, optional=("bound",))
        before, after = (LayerStatistics.from_dict(data[key], f"{where}.{key}") for key in ("before", "after"))
        q, k = (None if data[k] is None else _numbers(data[k], f"{where}.{k}") for k in ("gain_q", "gain_k"))
        bound = None if data.get("bound") is None else number(data["bound"], f"{where}.bound")
        return cls(before, after, q, k, bound)


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
        bound = "" if self.bound is None else f"; |logit| ≤ {fixed(self.bound, 1)} for any input"
        if self.base is None or self.ones is None or self.chosen is None:
            return f"{self.title}: gains from {self.tokens:,} tokens{bound}"
        kept = "" if self.kept is None else f" ({self.kept:.1%} of the jump removed)"
        return (
            f"{self.title}: loss {self.base.loss:.3f} unpatched, {self.ones.loss:.3f} with fresh gains, "
            f"{self.chosen.loss:.3f} calibrated on {self.tokens:,} tokens{kept}; KL {self.chosen.kl:.4f}{bound}"
        )

    def table(self) -> str:
        """Predictions, and the layers with the largest logits: a few lines of text, up to 120 wide."""
        return calibration_table(self)

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
        required, optional = _names(cls)
        check_keys(data, ("format", *required), "report", optional)
        if data["format"] != FORMAT:
            raise ValueError(f"report.format is {brief(data['format'])}, expected {FORMAT}: another hf_qknorm wrote it")
        if not isinstance(data["layers"], Mapping) or len(data["layers"]) > LAYERS:
            raise ValueError(
                f"report.layers is {brief(data['layers'])}, expected a mapping from at most {LAYERS:,} layers' names"
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
            tokens=count(data["tokens"], "report.tokens"),
            scheme=Scheme.from_dict(data["scheme"]),
            cap=positive(data["cap"], "report.cap"),
            base=base,
            ones=ones,
            chosen=chosen,
            layers=layers,
            judged=None if data.get("judged") is None else count(data["judged"], "report.judged"),
            base_model=repo_id(data.get("base_model"), "report.base_model"),
            dataset=repo_id(data.get("dataset"), "report.dataset"),
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


def _names(data_class: type[DataclassInstance]) -> tuple[list[str], list[str]]:
    """The names of the fields without a default, and of those with one."""
    names: tuple[list[str], list[str]] = ([], [])
    for field in dataclasses.fields(data_class):
        has_default = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        names[has_default].append(field.name)
    return names


def _knees(value: Any) -> dict[float, Prediction]:
    if not isinstance(value, list | tuple) or len(value) > KNEES:
        raise ValueError(f"report.knees is {brief(value)}, expected a list of at most {KNEES} predictions by knee")
    found = {}
    for i, item in enumerate(value):
        where = f"report.knees[{i}]"
        if not isinstance(item, Mapping) or "knee" not in item:
            raise ValueError(f"{where} is {brief(item)}, expected a mapping with a knee and its predictions")
        knee = number(item["knee"], f"{where}.knee")
        if not (math.isfinite(knee) and knee >= 0):
            raise ValueError(f"{where}.knee is {knee}, expected a finite number ≥ 0")
        found[knee] = Prediction.from_dict({key: x for key, x in item.items() if key != "knee"}, where)
    return found


def _numbers(value: Any, where: str) -> Numbers:
    if not isinstance(value, list | tuple) or not 0 < len(value) <= HEADS:
        raise ValueError(f"{where} is {brief(value)}, expected a list of numbers, one a head")
    return tuple(number(item, f"{where}[{i}]") for i, item in enumerate(value))


def _named(value: Any, where: str, what: str) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError(f"{where} is {brief(value)}, expected {what}: letters, digits, _ and .")
    return value
