"""A model's predictions and a layer's statistics as plain numbers, to and from JSON."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.untrusted import check_count, check_keys, check_number
from hf_qknorm.reports.tables import Table, mean

FORMAT = 1  # of reports and logs
COLLAPSED = 0.1  # of the entropy of even attention: a head below it attends to hardly more than one token
HEADS, LAYERS = 10_000, 10_000  # limits, far beyond any model
NAME = re.compile(r"[\w.]{1,200}", re.ASCII)  # a layer's path, or a method

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Prediction:
    """A model's mean next-token `loss` in nats per token, and its distance from the unpatched model.

    `kl` is KL(unpatched ‖ this) in nats per token, `agreement` the share of tokens after which both models give the
    same token the highest probability. The unpatched model itself has 0 and 1.
    """

    loss: float
    kl: float = 0.0
    agreement: float = 1.0

    @property
    def perplexity(self) -> float:
        """e to the power of the loss."""
        return math.exp(min(self.loss, 700.0))  # the limit of a float

    def to_dict(self) -> dict[str, float]:
        """The numbers by name, with the perplexity."""
        return {"loss": self.loss, "perplexity": self.perplexity, "kl": self.kl, "agreement": self.agreement}

    @classmethod
    def from_dict(cls, data: Any, where: str = "prediction") -> Prediction:
        """The inverse of `to_dict`. Raises ValueError, naming the key, for anything else."""
        check_keys(data, ("loss", "perplexity", "kl", "agreement"), where)
        numbers = {key: check_number(value, f"{where}.{key}") for key, value in data.items()}
        return cls(numbers["loss"], numbers["kl"], numbers["agreement"])


class Record:
    """The JSON form of a dataclass: its fields by name, without fields that have their default."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready data."""
        defaults = vars(type(self))  # of the fields that have one
        return to_json({name: x for name, x in vars(self).items() if name not in defaults or x != defaults[name]})

    @classmethod
    def from_dict(cls, data: Any, where: str = "record") -> Self:
        """The inverse of `to_dict`. Raises ValueError, naming the key, for anything else."""
        return cls(**read_fields(data, cls, where))


@dataclass(frozen=True)
class LayerStatistics(Record):
    """A layer's numbers, as in reports, inspections and logs: `LogitStatistics` of one per head, and more.

    `rms_k`, `rms_v` and `beyond_k` have one number per key head; `even`, `rms_out`, `rms_mlp` and those from `cap` on,
    except gradients, one in all. What could not be measured, or is not recorded there, has its default: keys in a layer
    that attends to another's; `beyond_q` and `beyond_k` without a knee.

    Of logs: `cap`, and `grad_q` and `grad_k`, the norms of the gradients of the weights, one per head or one for the
    projection. Of logs and inspections: `gain_q` and `gain_k`, the largest |gain| of the norms of queries and keys, the
    scheme's or the model's own, and `bound`, the largest |logit| that these norms let any input have.
    """

    max_logit: Numbers
    entropy: Numbers
    over_half: Numbers = ()
    over_cap: Numbers = ()
    rms_q: Numbers | None = None
    rms_k: Numbers | None = None
    beyond_q: Numbers | None = None
    beyond_k: Numbers | None = None
    rms_v: Numbers | None = None
    rms_out: float | None = None
    rms_mlp: float | None = None
    even: float = 0.0
    cap: float = 0.0
    gain_q: float | None = None
    gain_k: float | None = None
    bound: float | None = None
    grad_q: Numbers | None = None
    grad_k: Numbers | None = None

    @property
    def rms_qkv(self) -> float:
        """The root mean square of queries, keys (unless they are another layer's) and values together."""
        parts = (self.rms_q, self.rms_k, self.rms_v)
        return math.sqrt(mean([x * x for numbers in parts for x in numbers or ()]))

    def collapsed(self, cap: float, share: float = COLLAPSED) -> tuple[int, ...]:
        """The heads with |logit| over half the cap and an entropy under this share of even attention's."""
        # low entropy with small logits is normal: heads that attend to the previous token have it from the start
        heads = zip(self.entropy, self.max_logit, strict=True)
        return tuple(i for i, (nats, logit) in enumerate(heads) if nats < share * self.even and logit > cap / 2)


@dataclass(frozen=True)
class LayerReport(Record):
    """A layer's statistics unpatched (`before`) and patched (`after`), and the rms of each head's gain.

    `before` is None where the patched model alone was measured. A gain is None where the norm has none. `bound` is that
    of the patched layer, before any cap; None where the scheme does not norm both queries and keys.
    """

    before: LayerStatistics | None
    after: LayerStatistics
    gain_q: Numbers | None
    gain_k: Numbers | None
    bound: float | None = None


def largest_bound(bounds: Iterable[float | None]) -> float | None:
    """The largest of the layers' bounds; None if a layer has none."""
    found = list(bounds)
    known = [bound for bound in found if bound is not None]
    return max(known) if known and len(known) == len(found) else None


def predictions_table(predictions: Mapping[str, Prediction | None]) -> Table:
    """A table with a line per prediction that is not None; empty without any."""
    rows = [["", "loss", "perplexity", "KL", "same top token"]]
    for name, p in predictions.items():
        if p is not None:
            rows.append([name, f"{p.loss:.3f}", f"{p.perplexity:.2f}", f"{p.kl:.4f}", f"{p.agreement:.1%}"])
    return Table(rows if len(rows) > 1 else [])


def to_json(value: Any) -> Any:
    """The value as JSON-ready data: dataclasses by their own `to_dict` or else by their fields, tuples as lists."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        items = value if isinstance(value, Mapping) else vars(value)
        return {key: to_json(item) for key, item in items.items()}
    return value


def read_fields(
    data: Any, data_class: Any, where: str, *, versioned: bool = False, **readers: Callable[[Any, str], Any]
) -> dict[str, Any]:
    """The fields of `data_class` in `data`, each by its reader in `readers`, or else by its type's in `READERS`.

    Fields with a default may be missing, and those of type `… | None` null, or NaN for each head. With `versioned`,
    `data` also has a "format". Raises ValueError for other keys, another version's format, and values that the readers
    refuse.
    """
    fields, missing = dataclasses.fields(data_class), dataclasses.MISSING
    optional = [field.name for field in fields if (field.default, field.default_factory) != (missing, missing)]
    required = [*["format"] * versioned, *(field.name for field in fields if field.name not in optional)]
    check_keys(data, required, where, optional)
    if versioned and data["format"] != FORMAT:
        raise ValueError(f"{where}.format is {shorten(data['format'])}, expected {FORMAT}: another hf_qknorm wrote it")
    values = {}
    for field in fields:
        kind, _, nullable = field.type.partition(" | ")
        if field.name in data:
            value, read = data[field.name], readers.get(field.name) or READERS[kind]
            absent = nullable and (value is None or _is_nan(value))
            values[field.name] = None if absent else read(value, f"{where}.{field.name}")
    return values


def _is_nan(value: Any) -> bool:
    """Whether a list is NaN throughout, which stood for numbers that can't be measured before null did."""
    return isinstance(value, list | tuple) and bool(value) and all(x != x for x in value)


def read_layers(layers: Any, where: str, record: type[Record]) -> dict[str, Any]:
    """The record of each layer, by name. Raises ValueError for anything but a mapping from layers' names."""
    if not isinstance(layers, Mapping) or len(layers) > LAYERS:
        raise ValueError(f"{where} is {shorten(layers)}, expected a mapping from at most {LAYERS:,} layers' names")
    for name in layers:
        check_name(name, f"a name in {where}", "a module's path")
    return {name: record.from_dict(layer, f"{where}.{name}") for name, layer in layers.items()}


def check_name(value: Any, where: str, what: str = "a name") -> str:
    """`value`, a name of letters, digits, _ and dots. Raises ValueError for anything else."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError(f"{where} is {shorten(value)}, expected {what}: letters, digits, _ and .")
    return value


def head_numbers(value: Any, where: str) -> Numbers:
    """`value`, a list of numbers. Raises ValueError for anything else, and for an empty list."""
    if not isinstance(value, list | tuple) or not 0 < len(value) <= HEADS:
        raise ValueError(f"{where} is {shorten(value)}, expected a list of numbers, one per head")
    return tuple(check_number(item, f"{where}[{i}]") for i, item in enumerate(value))


READERS: Final[dict[str, Callable[[Any, str], Any]]] = {
    "int": check_count,
    "float": check_number,
    "str": check_name,
    "Numbers": head_numbers,
    "Prediction": Prediction.from_dict,
    "LayerStatistics": LayerStatistics.from_dict,
}
