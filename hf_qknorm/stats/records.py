"""A model's predictions and a layer's statistics, as numbers at rest: to and from JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.untrusted import check_keys, check_number
from hf_qknorm.stats.tables import aligned

HEADS = 10_000  # more than any model has

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
        numbers = {key: check_number(value, f"{where}.{key}") for key, value in data.items()}
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
        required, optional = field_names(cls)
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
        bound = None if data.get("bound") is None else check_number(data["bound"], f"{where}.bound")
        return cls(before, after, q, k, bound)


def predictions_table(predictions: Mapping[str, Prediction]) -> str:
    """A line a prediction; empty without any."""
    rows = [["", "loss", "perplexity", "KL", "same top token"]]
    for name, p in predictions.items():
        rows.append([name, f"{p.loss:.3f}", f"{p.perplexity:.2f}", f"{p.kl:.4f}", f"{p.agreement:.1%}"])
    return aligned(rows) if predictions else ""


def field_names(data_class: Any) -> tuple[list[str], list[str]]:
    """The names of the fields without a default, and of those with one."""
    names: tuple[list[str], list[str]] = ([], [])
    for field in dataclasses.fields(data_class):
        has_default = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        names[has_default].append(field.name)
    return names


def _numbers(value: Any, where: str) -> Numbers:
    if not isinstance(value, list | tuple) or not 0 < len(value) <= HEADS:
        raise ValueError(f"{where} is {shorten(value)}, expected a list of numbers, one a head")
    return tuple(check_number(item, f"{where}[{i}]") for i, item in enumerate(value))
