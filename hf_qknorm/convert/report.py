"""What a conversion did to a model: predictions and, layer by layer, logits and gains; as JSON and as a table."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_qknorm.files import replace_text
from hf_qknorm.scheme import Scheme
from hf_qknorm.strangers import brief, check_keys, count, number, positive, read_json, repo_id

FORMAT = 1
LAYERS, HEADS = 10_000, 10_000  # more than any model has
NAME = re.compile(r"[\w.]{1,200}", re.ASCII)  # of a layer, a module's path; and of a method
ROWS = 12  # layers in a table: the worst ones; JSON has them all

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
    """A layer's attention, a number a head: `LogitStatistics` at rest. `rms_k` has one for each key head."""

    max_logit: Numbers
    entropy: Numbers
    over_half: Numbers
    over_cap: Numbers
    rms_q: Numbers
    rms_k: Numbers

    def to_dict(self) -> dict[str, list[float]]:
        """The numbers by name."""
        return {field.name: list(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: Any, where: str = "statistics") -> LayerStatistics:
        """What `to_dict` wrote. Raises ValueError, naming the key, for anything else."""
        names = tuple(field.name for field in dataclasses.fields(cls))
        check_keys(data, names, where)
        return cls(*(_numbers(data[name], f"{where}.{name}") for name in names))


@dataclass(frozen=True)
class LayerReport:
    """A layer unpatched and as it is now, and the root mean square of each head's gain (None: no gain there)."""

    before: LayerStatistics
    after: LayerStatistics
    gain_q: Numbers | None = None
    gain_k: Numbers | None = None

    def to_dict(self) -> dict[str, Any]:
        """The numbers by name."""
        gains = {name: None if gain is None else list(gain) for name, gain in self._gains()}
        return {"before": self.before.to_dict(), "after": self.after.to_dict(), **gains}

    def _gains(self) -> list[tuple[str, Numbers | None]]:
        return [("gain_q", self.gain_q), ("gain_k", self.gain_k)]

    @classmethod
    def from_dict(cls, data: Any, where: str = "layer") -> LayerReport:
        """What `to_dict` wrote. Raises ValueError, naming the key, for anything else."""
        check_keys(data, ("before", "after", "gain_q", "gain_k"), where)
        before, after = (LayerStatistics.from_dict(data[key], f"{where}.{key}") for key in ("before", "after"))
        gains = (None if data[k] is None else _numbers(data[k], f"{where}.{k}") for k in ("gain_q", "gain_k"))
        return cls(before, after, *gains)


@dataclass(frozen=True)
class Calibration:
    """What a calibration did to a model's predictions and logits, over the first few batches of its data.

    `base` is the unpatched model, `ones` the scheme with fresh gains, `chosen` with the calibrated ones; all three are
    None for a model without a language-modelling head. `layers` has every attention layer by name; shares of large
    logits are relative to `cap`. `judged` says over how many of the `tokens` all this was measured. `base_model` and
    `dataset` are the Hub names of what was converted and of the text, None for what came from this machine.
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
    knees: Mapping[float, float] = field(default_factory=dict)

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
    def kept(self) -> float | None:
        """The share of the jump in loss that the calibration removed; None if there was no jump to remove."""
        if self.base is None or self.ones is None or self.chosen is None or self.ones.loss <= self.base.loss:
            return None
        share = (self.ones.loss - self.chosen.loss) / (self.ones.loss - self.base.loss)
        return share if math.isfinite(share) else None

    def __str__(self) -> str:
        if self.base is None or self.ones is None or self.chosen is None:
            return f"{self.method}: gains from {self.tokens:,} tokens"
        kept = "" if self.kept is None else f" ({self.kept:.0%} of the jump removed)"
        return (
            f"{self.method}: loss {self.base.loss:.3f} unpatched, {self.ones.loss:.3f} with fresh gains, "
            f"{self.chosen.loss:.3f} calibrated on {self.tokens:,} tokens{kept}; KL {self.chosen.kl:.4f}"
        )

    def table(self) -> str:
        """Predictions, and the layers with the largest logits: a few lines of text."""
        named = {"unpatched": self.base, "fresh gains": self.ones, self.method: self.chosen}
        parts = [f"{self.method} on {self.tokens:,} tokens: {self.scheme}"]
        parts.append(predictions_table({n: p for n, p in named.items() if p is not None}))
        worst = sorted(self.layers.items(), key=lambda item: -max(item[1].after.max_logit))
        rows = [["layer", "max |logit|", "entropy", *over_names(self.cap), "rms q", "rms k", "gain q", "gain k"]]
        for name, layer in worst[:ROWS]:
            both = (layer.before, layer.after)
            rows.append([name, *(" → ".join(pair) for pair in zip(*map(_cells, both), strict=True))])
            rows[-1] += [f"{mean(layer.before.rms_q):.3g}", f"{mean(layer.before.rms_k):.3g}"]
            rows[-1] += ["-" if gain is None else f"{mean(gain):.3g}" for _, gain in layer._gains()]
        parts += [aligned(rows) + rest(len(worst)), f"Before → after; {READING}."]
        return "\n\n".join(part for part in parts if part)

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
        }

    @classmethod
    def from_dict(cls, data: Any) -> Calibration:
        """The report that `to_dict` wrote. Raises ValueError, naming the key, for anything else."""
        required = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]
        check_keys(data, ("format", *required), "report", optional=("judged", "base_model", "dataset"))
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


READING = "max |logit|: worst head, before any cap; entropy: sharpest head, in nats; others: means over heads"


def predictions_table(predictions: Mapping[str, Prediction]) -> str:
    """A line a prediction; empty without any."""
    rows = [["", "loss", "perplexity", "KL", "same top token"]]
    for name, p in predictions.items():
        rows.append([name, f"{p.loss:.3f}", f"{p.perplexity:.2f}", f"{p.kl:.4f}", f"{p.agreement:.1%}"])
    return aligned(rows) if predictions else ""


def over_names(cap: float) -> list[str]:
    """The names of the columns of shares: `> 25`, `> 50`."""
    return [f"> {cap / 2:g}", f"> {cap:g}"]


def _cells(layer: LayerStatistics) -> list[str]:
    shares = [f"{mean(layer.over_half):.2%}", f"{mean(layer.over_cap):.2%}"]
    return [f"{max(layer.max_logit):.1f}", f"{min(layer.entropy):.2f}", *shares]


def rest(layers: int) -> str:
    """The line below a table that leaves layers out."""
    return f"\n… and {layers - ROWS} calmer layers" if layers > ROWS else ""


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def mean(values: Iterable[float]) -> float:
    """The mean of a few numbers."""
    values = list(values)
    return sum(values) / len(values)


def _numbers(value: Any, where: str) -> Numbers:
    if not isinstance(value, list | tuple) or not 0 < len(value) <= HEADS:
        raise ValueError(f"{where} is {brief(value)}, expected a list of numbers, one a head")
    return tuple(number(item, f"{where}[{i}]") for i, item in enumerate(value))


def _named(value: Any, where: str, what: str) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError(f"{where} is {brief(value)}, expected {what}: letters, digits, _ and .")
    return value
