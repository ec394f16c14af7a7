"""A model's predictions and a layer's statistics as plain numbers; from and to JSON, by pydantic."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from hf_qknorm.files.formatting import shorten

FORMAT: Final = 1  # of reports and logs
STRICT: Final = ConfigDict(extra="forbid", strict=True)  # as files are not to be trusted
NAMED: Final = 3  # errors in a message
PATH: Final = re.compile(r"[\w.\[\]-]{1,300}", re.ASCII)  # to a field, with a layer's name in it

Numbers = Annotated[tuple[float, ...], Field(min_length=1, max_length=10_000)]  # of heads
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]{1,200}$")]  # a layer's path
Count = Annotated[int, Field(ge=0, lt=2**63)]
T = TypeVar("T")


@dataclass(frozen=True)
class Prediction:
    """A model's mean next-token `loss` in nats per token, and its distance from the unpatched model.

    `kl` is KL(unpatched ‖ this) in nats per token, `agreement` the share of tokens after which both models give the
    same token the highest probability. The unpatched model itself has 0 and 1. `bound`, of an inspection, is the
    largest |logit| of any layer for any input; None without a bound.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    loss: float
    kl: float = 0.0
    agreement: float = 1.0
    bound: float | None = None

    @property
    def perplexity(self) -> float:
        """e to the power of the loss."""
        return math.exp(min(self.loss, 700.0))  # the limit of a float


@dataclass(frozen=True)
class LayerStatistics:
    """A layer's numbers in reports, in inspections and in LogitMonitor's log; the fields of a line in the log.

    - `max_logit`, `entropy`, `over_half`, `over_cap`, `even`: as in `LogitStatistics`
    - `gain_q`, `gain_k`: the largest |gain| of the norms of queries and of keys, the scheme's or the model's own
    - `bound`: the largest |logit| that these norms let any input have, before any cap
    - `cap`: of logs: the reference of `over_half` and `over_cap`, the layer's own cap or 50

    What is not there or was not measured has its default, and no field in a file: gains and bound without norms.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    max_logit: Numbers
    entropy: Numbers
    over_half: tuple[float, ...] = ()
    over_cap: tuple[float, ...] = ()
    even: float = 0.0
    cap: float = 0.0
    gain_q: float | None = None
    gain_k: float | None = None
    bound: float | None = None


@dataclass(frozen=True)
class LayerReport:
    """A layer's statistics unpatched (`before`) and patched (`after`)."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    before: LayerStatistics
    after: LayerStatistics


def largest_bound(bounds: Iterable[float | None]) -> float | None:
    """The largest of the layers' bounds; None if a layer has none."""
    found = list(bounds)
    known = [bound for bound in found if bound is not None]
    return max(known) if known and len(known) == len(found) else None


def read_json(adapter: TypeAdapter[T], text: str | bytes, where: str) -> T:
    """Read JSON from a file that is not to be trusted. Raises ValueError, naming `where` and the fields, in one line.

    Refused are unknown and missing fields, values of other types, deep nesting, and what is no JSON.
    """
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
    named = [f"{_place(each['loc'])}{each['msg']}{_given(each)}" for each in found[:NAMED]]
    more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
    raise ValueError(f"{where}: {'; '.join(named)}{more}")


def _given(error: Any) -> str:
    """The value that is wrong; of a missing one, the input is all around it."""
    return "" if error["type"] in ("missing", "missing_argument") else f", got {shorten(error['input'])}"


def _place(parts: tuple[int | str, ...]) -> str:
    """The path to a field; one that no file of ours has is quoted and shortened."""
    path = ".".join(map(str, parts))
    return f"{path if PATH.fullmatch(path) else shorten(path)}: " if parts else ""
