"""The properties of a call that select its compiled code on a device: the key of a self-check's verdict."""

from __future__ import annotations

from operator import index
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from hf_qknorm.ops.triton.architectures import CAP_WITHOUT_MAXIMUM, LEAST_KEYS, MOST_QUERIES
from hf_qknorm.ops.types import Heads, Norm, Options, Visible

OperatorName = Literal[
    "attention",
    "statistics",
    "norm_rope",
    "norm_rope_one",
    "step",
    "append",
    "flex",
    "cpu",
    "cpu_statistics",
    "cpu_norm_rope",
]

NORM_OPERATORS: Final = ("norm_rope", "norm_rope_one", "cpu_norm_rope")
STEPS: Final = ("step", "append")  # over a static cache, or behind the keys of a dynamic one
CPU_OPERATORS: Final = ("cpu", "cpu_statistics", "cpu_norm_rope")


class NormPath(NamedTuple):
    """A norm's kind, order and sharpness; the dimensions of gain and bias (0: one number), the gain's dtype."""

    kind: str
    p: float
    gain: int | None
    bias: int | None
    dtype: torch.dtype | None
    blend: bool
    stored_eps: bool
    sharpness: int = 1


class CodePath(NamedTuple):
    """An operator, the dtype and the sizes of its heads, its norms and rotation, and which options it has."""

    operator: OperatorName
    dtype: torch.dtype
    head_dim: int
    group: int  # query heads of a key head
    gradient: bool
    queries: int = 0  # of a few over a cache: the most of this many rows, up to the next power of two; else 0
    many_keys: bool = True
    q_norm: NormPath | None = None
    k_norm: NormPath | None = None
    rotary: tuple[int, bool, torch.dtype] | None = None  # rotated columns, interleaved, dtype of cos and sin
    cap: Literal["none", "small", "large"] = "none"
    causal: bool = False
    window: bool = False
    ranges: bool = False
    sinks: bool = False
    dropout: bool = False

    @classmethod
    def of(cls, values: tuple[Any, ...]) -> CodePath:
        """The path of these `fields`."""
        path = cls(*values)
        q_norm, k_norm = (None if norm is None else NormPath(*norm) for norm in (path.q_norm, path.k_norm))
        return path._replace(q_norm=q_norm, k_norm=k_norm)

    def __str__(self) -> str:
        """The path in words, for messages."""
        sizes = (
            f"{str(self.dtype).removeprefix('torch.')}, head_dim {self.head_dim}, {self.group} query heads a key head"
        )
        norms = [norm.kind if norm else "none" for norm in (self.q_norm, self.k_norm)]
        switches = ("causal", "window", "ranges", "sinks", "dropout", "gradient")
        parts = [
            sizes,
            f"{self.queries} queries over a cache" if self.queries else "",
            f"norms {norms[0]} and {norms[1]}" if norms != ["none", "none"] else "",
            f"RoPE of {self.rotary[0]} columns" if self.rotary else "",
            f"a {self.cap} cap" if self.cap != "none" else "",
            *(name for name in switches if getattr(self, name)),
        ]
        return ", ".join(part for part in parts if part)


def fields(heads: Heads, visible: Visible, options: Options, operator: OperatorName) -> tuple[Any, ...]:
    """The fields of a call's `CodePath`, plain values that a trace takes as constants; a trace keeps no lengths.

    It runs before every call of the kernels, and takes a few microseconds. `index` and `if` make numbers of a trace's
    symbols, which `int`, `bool` and `not` do not in all versions of torch.
    """
    q, k, v, q_norm, k_norm, rotary = heads
    _, count, length, head_dim = q.shape
    _, count_kv, keys, _ = k.shape
    group, raw = count // count_kv, rotary is not None or q_norm.kind != "none" or k_norm.kind != "none"
    # Gains mostly need gradients, and so do raw heads.
    gradient = torch.is_grad_enabled() and (raw or q.requires_grad or k.requires_grad or v.requires_grad)
    path = operator, q.dtype, index(head_dim), index(group), gradient
    ends: tuple[Any, ...] = None, None, None  # neither norms nor a rotation
    if raw:
        turned = None if rotary is None else (2 * rotary.cos.shape[-1], rotary.interleaved, rotary.cos.dtype)
        ends = _norm_path(q_norm), _norm_path(k_norm), turned
        if operator in NORM_OPERATORS:
            return *path, 0, True, *ends
    queries, many_keys = 0, True
    over_cache = operator not in CPU_OPERATORS and (operator in STEPS or not raw)
    if over_cache and not torch.compiler.is_compiling() and length < keys and group * length < MOST_QUERIES:
        rows = 1 << (group * length - 1).bit_length()  # the most that fill the same tiles
        queries, many_keys = min(rows, MOST_QUERIES - 1) // group, keys >= LEAST_KEYS
    ranges, sinks, _, _ = visible
    _, softcap, causal, window, dropout = options
    cap = "none" if softcap is None else "small" if softcap <= CAP_WITHOUT_MAXIMUM else "large"
    drops = False if dropout <= 0 else True  # noqa: SIM211
    switches = causal, window is not None, ranges is not None, sinks is not None, drops
    return *path, queries, many_keys, *ends, cap, *switches


def _norm_path(norm: Norm) -> tuple[Any, ...] | None:
    """The values of a `NormPath`."""
    kind, gain, bias, blend, eps, p, sharpness = norm
    if kind == "none":
        return None
    dimensions, dtype = None, None
    if gain is not None:
        dimensions, dtype = gain.dim() if gain.numel() > 1 else 0, gain.dtype
    biases = None if bias is None else bias.dim() if bias.numel() > 1 else 0
    return kind, p, dimensions, biases, dtype, blend is not None, isinstance(eps, Tensor), sharpness
