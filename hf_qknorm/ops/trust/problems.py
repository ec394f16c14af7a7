"""Problems for the self-check: one call of a path, of a few tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_qknorm.ops import library, reference
from hf_qknorm.ops.cpu import attention as cpu_attention
from hf_qknorm.ops.triton.architectures import MOST_ROWS
from hf_qknorm.ops.trust.code_path import STEPS, CodePath, NormPath
from hf_qknorm.ops.types import Heads, Norm, Options, Rotary, Visible

LENGTH = 300  # more than two tiles of every kernel, and no multiple of one
SHORT = 40  # the length where there are many sequences
LONGER = 7  # times LENGTH is a length of so many tiles that several programs share a block
FEW_HEADS = 4  # query heads for a key head, at most, that leave processors idle
KEYS, FEW_KEYS = 600, 100  # in a cache
FEW_QUERIES = MOST_ROWS + 16  # for MOST_ROWS rows or fewer, keys are split in any case
CAPS = {"none": None, "small": 5.0, "large": 80.0}
WINDOW, RATE, SEED = 70, 0.25, 7


class Problem(NamedTuple):
    """One call, and the mask `[B, H, T, S]` of its dropout, if it has one."""

    path: CodePath
    heads: Heads
    visible: Visible
    options: Options
    dropout_mask: Tensor | None = None

    @property
    def seen(self) -> Tensor:
        """Whether each query sees each key, `[B or 1, 1, T, S]`."""
        queries, keys, device = self.heads.q.shape[2], self.heads.k.shape[2], self.heads.q.device
        seen = reference.visible(queries, keys, self.options.causal, self.options.window, device)[None, None]
        return seen if self.visible.ranges is None else seen & reference.in_ranges(self.visible.ranges, keys)


def problems(path: CodePath, device: torch.device) -> list[Problem]:
    """The problems of a path: one for each way that the kernels choose by sizes or numbers.

    A bound on the logits of normed heads chooses their loop. Programs share a block where there are fewer than two
    blocks for each processor and many tiles. Over a cache, keys are split where queries leave processors idle.
    """
    found = [draw(path, device)]
    first = found[0]
    if path.operator in ("cpu", "cpu_statistics"):  # one path for all lengths
        found.append(draw(path._replace(queries=FEW_QUERIES), device))
        if not path.gradient:  # with it the kernels are the same for one query, whose few large weights scatter errors
            found.append(draw(path._replace(queries=1), device))
    if path.operator in ("attention", "statistics") and first.heads.raw:
        factor = 10.0 if path.cap == "none" else 0.02  # beyond the bound for no maximum; within the polynomial's
        found.append(first._replace(options=first.options._replace(scale=factor * first.options.scale)))
    if path.operator == "attention" and path.gradient and path.group > 1:
        batch = -(-2 * _processors(device) // first.heads.k.shape[1])
        found.append(draw(path, device, batch, SHORT))
    if path.operator == "attention" and path.group <= FEW_HEADS and not path.queries:
        found.append(draw(path, device, 1, LONGER * LENGTH, heads_kv=1))
    if path.operator in ("attention", *STEPS) and path.many_keys and path.queries * path.group > MOST_ROWS:
        batch = _processors(device) // (2 * first.heads.q.shape[1]) + 1
        found.append(draw(path._replace(queries=MOST_ROWS // path.group + 1), device, batch))
    return [problem._replace(dropout_mask=dropout_mask(problem)) if path.dropout else problem for problem in found]


def _processors(device: torch.device) -> int:
    from hf_qknorm.ops.triton import schedule

    return schedule.gpu(device).processors


def draw(
    path: CodePath, device: torch.device, batch: int = 2, length: int | None = None, heads_kv: int | None = None
) -> Problem:
    """Heads in a projection's layout, with padding at the start of some rows if the path has ranges."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def norm(of: NormPath | None, heads: int) -> Norm:
        if of is None:
            return Norm()
        shapes = {0: (1,), 1: (path.head_dim,), 2: (heads, path.head_dim)}
        gain, bias = (
            None if n is None else (mean + normal(*shapes[n]) / 4).to(device, of.dtype or path.dtype)
            for n, mean in ((of.gain, 1.0), (of.bias, 0.0))
        )
        blend, eps = (torch.tensor(x, dtype=torch.float32, device=device) for x in (0.5, 1.0))
        numbers = (blend if of.blend else None, eps if of.stored_eps else 1e-6)
        return Norm(of.kind, gain, bias, *numbers, of.p, of.sharpness)

    heads_kv = heads_kv or (2 if path.group <= 8 else 1)
    queries = keys = LENGTH if length is None else length
    if path.queries and length is None:
        queries = path.queries if path.many_keys else min(path.queries, FEW_QUERIES)
        keys = max(KEYS, 2 * queries) if path.many_keys else FEW_KEYS
    q, k, v = (
        normal(batch, rows, count, path.head_dim).to(device, path.dtype).transpose(1, 2)
        for count, rows in ((heads_kv * path.group, queries), (heads_kv, keys), (heads_kv, keys))
    )
    rotary = ranges = None
    if path.rotary is not None:
        columns, interleaved, dtype = path.rotary
        angle = 6 * normal(1, queries, columns // 2)
        rotary = Rotary(angle.cos().to(device, dtype), angle.sin().to(device, dtype), interleaved)
    if path.ranges:
        stop = torch.arange(keys - queries, keys, device=device).expand(batch, -1) + 1
        start = (torch.arange(batch, device=device)[:, None] % 2 * (keys // 3)).expand_as(stop)
        ranges = torch.stack([start, stop], -1).to(torch.int32)
    sinks = normal(q.shape[1]).to(device, path.dtype) if path.sinks else None
    seed = torch.tensor([SEED], device=device) if path.dropout else None
    window, rate = WINDOW if path.window else None, RATE if path.dropout else 0.0
    return Problem(
        path,
        Heads(q, k, v, norm(path.q_norm, q.shape[1]), norm(path.k_norm, heads_kv), rotary),
        Visible(ranges, sinks, seed),
        Options(path.head_dim**-0.5, CAPS[path.cap], path.causal, window, rate),
    )


def dropout_mask(problem: Problem) -> Tensor:
    """The mask that the kernels multiply weights by, read from the outputs for nearly equal weights and unit values."""
    path, heads, visible, options, _ = problem
    attend = cpu_attention.attention if path.operator == "cpu" else library.fused_attention
    v, kept = heads.v, []
    size, length = v.shape[-1], v.shape[2]
    for start in range(0, length, size):
        units = torch.zeros_like(v)
        units[:, :, start : start + size] = torch.eye(size, device=v.device)[: length - start]
        kept.append(attend(heads._replace(v=units), visible, options._replace(scale=1e-3)) > 0)
    return torch.cat(kept, -1)[..., :length] / (1 - options.dropout)
