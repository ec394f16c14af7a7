"""Spans of keys from transformers' mask functions, in closed form.

transformers describes a mask by a function of (batch, head, query, key). Its own functions for causality, windows and
packing have spans in closed form. They are closures and are recognised by name. Because another version may change a
function, its code is checked against the expected mask on a small example, once a process. The masks of all other
functions are read key by key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from operator import and_
from types import CellType, CodeType, FunctionType
from typing import Any, Final

import torch
from torch import Tensor
from transformers import masking_utils

from hf_qknorm.attend.spans import Spans
from hf_qknorm.files.log import logger

MaskFunction = Callable[[Any, Any, Any, Any], Tensor]


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


_SEQUENCE, _POSITION = torch.tensor([0] * 5 + [1] * 7), torch.tensor([*range(5), *range(7)])


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
    query, key = torch.arange(len(_SEQUENCE))[:, None], torch.arange(len(_SEQUENCE))
    try:
        cells = tuple(CellType(captured[name]) for name in code.co_freevars)
        example = FunctionType(code, vars(masking_utils), closure=cells)
        zero = torch.zeros((), dtype=torch.int64)
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
