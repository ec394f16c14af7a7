"""Spans of keys from transformers' mask functions, in closed form.

transformers describes a mask by a function of (batch, head, query, key). Its own functions for causality, windows and
packing have spans in closed form. They are closures and are recognised by name. Because another version may change a
function, its code is checked against the expected mask on a small example, once a process. The masks of all other
functions are read key by key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, reduce
from operator import and_
from types import CellType, CodeType, FunctionType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.utils import is_tracing

from hf_qknorm.files.log import logger

MaskFunction = Callable[[Any, Any, Any, Any], Tensor]


class Spans(NamedTuple):
    """The keys of each query, from `start` on, before `stop`, broadcastable to `[B, T]`, if all `conditions` hold."""

    start: Tensor
    stop: Tensor
    conditions: tuple[Tensor, ...] = ()

    def __and__(self, other: Spans) -> Spans:
        """The keys in both spans."""
        start, stop = torch.maximum(self.start, other.start), torch.minimum(self.stop, other.stop)
        return Spans(start, stop, self.conditions + other.conditions)


def read(pieces: Iterable[Tensor]) -> Spans:
    """The spans of a boolean mask, from pieces of its rows `[B, 1, n, S]`."""
    bounds = []
    for seen in pieces:
        key = torch.arange(seen.shape[-1], device=seen.device, dtype=torch.int32)
        start, stop = torch.where(seen, key, seen.shape[-1]).amin(-1), torch.where(seen, key + 1, 0).amax(-1)
        bounds.append((start[:, 0], stop[:, 0], seen.sum(-1)[:, 0]))
    start, stop, count = (torch.cat(x, -1) for x in zip(*bounds, strict=True))
    if start.shape[-1] > 1 and not is_tracing(start):  # the functions of a trace let each query see its own key
        # Rows that see nothing get bounds by which no column decreases. If another one decreases, the counts differ.
        start, stop = start.flip(-1).cummin(-1).values.flip(-1), stop.cummax(-1).values
    return Spans(start, stop, (torch.where(count > 0, stop - start == count, stop <= start).all(),))


def known(function: MaskFunction, own: Tensor) -> Spans | None:
    """The spans of transformers' functions for causality, windows and packing, in closed form; None for others.

    `own` `[T]` is the key at each query's own position.
    """
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    made: Any = function  # most are closures
    captured = {
        name: x.cell_contents for name, x in zip(made.__code__.co_freevars, made.__closure__ or (), strict=True)
    }
    kind = made.__qualname__.partition(".")[0]
    everything = Spans(torch.zeros_like(own), torch.full_like(own, torch.iinfo(torch.int32).max))
    match kind if _is_as_expected(made.__code__, kind) else None, captured:
        case "bidirectional_mask_function", _:
            return everything
        case "causal_mask_function", _:
            return everything._replace(stop=own + 1)
        case "sliding_window_overlay", {"sliding_window": window}:
            return everything._replace(start=own - window + 1)
        case "sliding_window_bidirectional_overlay", {"sliding_window": window}:
            return Spans(own - window, own + window + 1)
        case "and_masks", {"mask_functions": functions}:
            parts = [known(f, own) for f in functions]
            found = [part for part in parts if part is not None]
            return reduce(and_, found) if len(found) == len(parts) else None
        case "packed_sequence_mask_function", {"packed_sequence_mask": ids} if ids.shape[-1] == len(own):
            start, stop = (torch.searchsorted(ids, ids, right=right) for right in (False, True))
            return Spans(start, stop, ((ids.diff() >= 0).all(),))
        case "remap_positions_for_packed_sequence", {"mask_function": inner}:
            return known(inner, own)  # within a sequence, positions count up as keys do; its ids are another part
    return None


# On the CPU, whatever torch's default device is.
_SEQUENCE, _POSITION = torch.tensor([[0] * 5 + [1] * 7, [*range(5), *range(7)]], device="cpu")


# For each kind, the variables that an example of it captures, and whether a query then sees a key.
_EXPECTED: Final[dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]]] = {
    "bidirectional_mask_function": ({}, lambda query, key: (query - key).abs() >= 0),
    "causal_mask_function": ({}, lambda query, key: key <= query),
    "sliding_window_overlay": ({"sliding_window": 3}, lambda query, key: query - key < 3),
    "sliding_window_bidirectional_overlay": ({"sliding_window": 3}, lambda query, key: (query - key).abs() <= 3),
    "and_masks": (
        {"mask_functions": (lambda _, __, query, key: key >= query - 2, lambda _, __, query, key: key <= query + 1)},
        lambda query, key: (key >= query - 2) & (key <= query + 1),
    ),
    "packed_sequence_mask_function": (
        {"packed_sequence_mask": _SEQUENCE[None]},
        lambda query, key: _SEQUENCE[query] == _SEQUENCE[key],
    ),
    "remap_positions_for_packed_sequence": (
        {"mask_function": lambda _, __, query, key: key >= query - 2, "position_ids": _POSITION[None]},
        lambda query, key: _POSITION[key] >= _POSITION[query] - 2,
    ),
}


@cache
def _is_as_expected(code: CodeType, kind: str) -> bool:
    """Whether a mask function of this code gives the expected mask on a small example; logs a warning if not."""
    if kind not in _EXPECTED:
        return False
    captured, expected = _EXPECTED[kind]
    key = torch.arange(len(_SEQUENCE), device="cpu")
    try:
        cells = tuple(CellType(captured[name]) for name in code.co_freevars)
        example = FunctionType(code, vars(masking_utils), closure=cells)
        zero, query = key[0], key[:, None]
        seen = example(zero, zero, query, key)
        matches = torch.equal(seen.expand(len(query), len(key)), expected(query, key))
    except Exception:  # another version's code may raise anything
        matches = False
    if not matches:
        logger.warning(
            "transformers' mask function %s differs from the one that this version of hf_qknorm knows: masks that use "
            "it are read key by key, which is correct and takes longer",
            kind,
        )
    return matches
