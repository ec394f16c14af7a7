"""The blocks of queries and keys that `tiled` computes: their logits, masks and dropout.

Shapes: B batch, H query heads, Hk key/value heads, G = H / Hk, T queries, S keys, D head_dim. The query heads of a
group are extra rows of a block, so that K and V are never repeated for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_qknorm.ops import threads
from hf_qknorm.ops.types import Heads, Options, Visible

BLOCK_ROWS = 64  # rows of logits a head and block: small enough for the cache, large enough for a good matmul
BLOCK_LOGITS = 1 << 22  # logits in one block at most (16 MiB in fp32)
SHARED_LOGITS = 1 << 21  # with fewer logits in a call, threads take longer to start than they save

# tanh(x) ≈ x·P(x²) on |x| ≤ SMALL to 3.5e-8, by interpolation at Chebyshev nodes; highest power first.
SMALL = 0.35
TANH_SMALL = (-0.04895564, 0.13295752, -0.3333242, 0.99999997)


class Share(NamedTuple):
    """A part of a call: these batch entries, and these key/value heads with their queries."""

    batch: slice
    heads_kv: slice

    def of(self, x: Tensor, heads_kv: int) -> Tensor:
        """The part of x `[B or 1, H or Hk or 1, ...]`."""
        x = x if x.shape[0] == 1 else x[self.batch]
        group = x.shape[1] // heads_kv  # 0: one for all heads
        first, last = self.heads_kv.start, self.heads_kv.stop
        return x[:, first * group : last * group] if group else x


def shares(heads: Heads) -> list[Share]:
    """The parts of a call to compute side by side: heads, which take equally long, or batch entries.

    One part, for torch's own threads to share, on other devices, for small calls and for few heads.
    """
    batch, heads_kv = heads.k.shape[:2]
    count = threads.count() if heads.q.device.type == "cpu" else 1
    small = math.prod(heads.q.shape[:3]) * heads.k.shape[2] < SHARED_LOGITS
    if count == 1 or small or max(batch, heads_kv) < count:
        return [Share(slice(0, batch), slice(0, heads_kv))]
    if heads_kv >= count:
        return [Share(slice(0, batch), part) for part in _parts(heads_kv, count)]
    return [Share(part, slice(0, heads_kv)) for part in _parts(batch, count)]


def _parts(size: int, count: int) -> list[slice]:
    """0 to `size` in `count` parts, or in more if these are not equal."""
    count = count if size % count == 0 else min(size, 3 * count)
    return [slice(size * i // count, size * (i + 1) // count) for i in range(count)]


@dataclass(frozen=True)
class Block:
    """The queries `rows` of the batch entries `batch`, and all keys that they see; `heads` are slices of `[B·Hk]`."""

    batch: slice
    heads: slice
    rows: slice
    cols: slice

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of batch entries, queries and keys."""
        b, n, w = (s.stop - s.start for s in (self.batch, self.rows, self.cols))
        return b, n, w


class Problem:
    """A share of an attention call, in the layout of the loops: q `[B·Hk, G, T, D]`, k and v `[B·Hk, S, D]`.

    All sizes are the share's. Without a share it is the whole call.
    """

    def __init__(self, heads: Heads, visible: Visible, options: Options, share: Share | None = None) -> None:
        whole_kv = heads.k.shape[1]
        share = share or Share(slice(0, heads.k.shape[0]), slice(0, whole_kv))
        q, k, v = (share.of(x, whole_kv) for x in heads[:3])
        ranges, sinks, self.seed, mask = visible
        ranges = ranges if ranges is None or ranges.shape[0] == 1 else ranges[share.batch]
        sinks = None if sinks is None else share.of(sinks[None], whole_kv)[0]
        self.mask = None if mask is None else share.of(mask, whole_kv)
        self.share, self.whole_kv, self.whole_batch = share, whole_kv, heads.k.shape[0]
        self.batch, count, self.queries, _ = q.shape
        self.heads_kv, self.keys = k.shape[1], k.shape[2]
        self.group = count // self.heads_kv
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.options, self.device = options, q.device
        # A query sees the keys from `least` to `most` positions behind its own; None: no limit.
        causal, window = options.causal, options.window
        self.least = 0 if causal else None if window is None else -window
        self.most = None if window is None else window - int(causal)
        self.ranges = None if ranges is None else ranges.clamp(0, self.keys)  # differences of int32 must not overflow
        self.sinks = None if sinks is None else sinks.to(self.dtype).view(self.heads_kv, self.group, 1, 1)
        self.q = self.grouped(q)
        self.k, self.v = (x.to(self.dtype).flatten(0, 1) for x in (k, v))
        self.blocks = list(self._blocks())

    def grouped(self, x: Tensor) -> Tensor:
        """`[B, H, T, *]` to `[B·Hk, G, T, *]`, in the dtype of the computation."""
        return x.to(self.dtype).reshape(self.batch * self.heads_kv, self.group, *x.shape[2:])

    def buffer(self) -> Tensor:
        """A buffer for the logits of the largest block."""
        largest = max((math.prod(block.shape) for block in self.blocks), default=0)
        return self.q.new_empty(largest * self.heads_kv * self.group)

    def _blocks(self) -> Iterator[Block]:
        """The blocks in order."""
        rows = max(BLOCK_ROWS // self.group, 16)
        batches = max(BLOCK_LOGITS // (self.heads_kv * self.group * rows * max(self.keys, 1)), 1)
        for first in range(0, self.batch, batches):
            batch = slice(first, min(first + batches, self.batch))
            heads = slice(batch.start * self.heads_kv, batch.stop * self.heads_kv)
            for start in range(0, self.queries, rows):
                block_rows = slice(start, min(start + rows, self.queries))
                cols = self._keys_seen(batch, block_rows)
                if cols.stop > cols.start:
                    yield Block(batch, heads, block_rows, cols)

    def _keys_near(self, rows: slice) -> slice:
        """The range of keys that causality and the window leave of the queries."""
        offset = self.keys - self.queries
        lo = 0 if self.most is None else min(max(rows.start + offset - self.most, 0), self.keys)
        hi = self.keys if self.least is None else min(max(rows.stop + offset - self.least, 0), self.keys)
        return slice(lo, max(lo, hi))

    def _keys_seen(self, batch: slice, rows: slice) -> slice:
        """The range of keys that any of the queries sees."""
        near = self._keys_near(rows)
        lo, hi = near.start, near.stop
        if self.ranges is not None and self.device.type == "cpu":
            spans = self._spans(self.ranges, batch, rows)
            spans = spans[spans[..., 1] > spans[..., 0]]
            if not len(spans):
                return slice(0, 0)
            lo, hi = max(lo, int(spans[:, 0].min())), min(hi, int(spans[:, 1].max()))
        if self.mask is not None and self.mask.dtype == torch.bool and self.device.type == "cpu":
            part = self._masks(batch, rows, slice(lo, hi)).flatten(0, -2).any(0)
            used = part.expand(max(hi - lo, 0)).nonzero()
            return slice(lo + int(used[0]), lo + int(used[-1]) + 1) if len(used) else slice(0, 0)
        return slice(lo, max(lo, hi))

    def _spans(self, ranges: Tensor, batch: slice, rows: slice) -> Tensor:
        """The part of the ranges for a block, `[b or 1, n, 2]`."""
        return ranges[batch if ranges.shape[0] > 1 else slice(None), rows]

    def _masks(self, batch: slice, rows: slice, cols: slice) -> Tensor:
        """The mask's part for a block, broadcastable to `[b, Hk, G, n, w]`."""
        assert self.mask is not None
        part = self.mask[batch if self.mask.shape[0] > 1 else slice(None)]
        part = part[:, :, rows if part.shape[2] > 1 else slice(None), cols if part.shape[3] > 1 else slice(None)]
        if part.shape[1] == 1:
            return part.unsqueeze(2)
        return part.view(part.shape[0], self.heads_kv, self.group, *part.shape[2:])

    def part(self, x: Tensor, block: Block) -> Tensor:
        """The block's rows of x `[B·Hk, G, T, *]`, as `[b·Hk, G·n, *]`."""
        return x[block.heads, :, block.rows].flatten(1, 2)

    def put(self, x: Tensor, block: Block, rows: Tensor) -> None:
        """Write `[b·Hk, G·n, *]` to the block's rows of x `[B·Hk, G, T, *]`."""
        x[block.heads, :, block.rows] = rows.view(rows.shape[0], self.group, -1, rows.shape[-1])

    def span(self, x: Tensor, block: Block) -> Tensor:
        """The block's keys of x `[B·Hk, S, D]`."""
        return x[block.heads, block.cols]

    def scores(self, block: Block, factor: float, out: Tensor) -> Tensor:
        """factor·q·kᵀ of a block, `[b·Hk, G·n, w]`, into the buffer `out`."""
        b, n, w = block.shape
        logits = out[: b * self.heads_kv * self.group * n * w].view(b * self.heads_kv, self.group * n, w)
        keys = self.span(self.k, block).transpose(1, 2)
        return torch.baddbmm(logits, self.part(self.q, block), keys, beta=0, alpha=factor, out=logits)

    def tanh_scores(self, block: Block, cap: float, out: Tensor, spare: Tensor) -> Tensor:
        """tanh(scale·q·kᵀ / cap) of a block, `[b·Hk, G·n, w]`, into the buffer `out`; `spare` is overwritten.

        For small arguments, as after norms, a polynomial takes a third of the time of torch.tanh on a CPU.
        """
        x = self.scores(block, self.options.scale, out).div_(cap)  # scale / cap would round once for all logits
        if self.device.type != "cpu" or x.dtype == torch.float64 or not _is_small(x):
            return x.tanh_()
        square = torch.mul(x, x, out=spare[: x.numel()].view(x.shape))
        leading, *others, last = TANH_SMALL
        factor = torch.mul(square, leading)
        for coefficient in others:
            factor.add_(coefficient).mul_(square)
        return x.mul_(factor.add_(last))

    def logits(self, block: Block, out: Tensor, spare: Tensor) -> Tensor:
        """The block's capped and masked logits, `[b·Hk, G·n, w]`, in the buffer `out`."""
        scale, cap = self.options[:2]
        logits = self.scores(block, scale, out) if cap is None else self.tanh_scores(block, cap, out, spare).mul_(cap)
        self.hide(logits, block)
        return logits

    def hide(self, logits: Tensor, block: Block) -> None:
        """Apply mask, ranges, causality and window to the block's logits, in place."""
        b, n, w = block.shape
        self._hide_in(logits.view(b, self.heads_kv, self.group, n, w), block)

    def seen(self, block: Block) -> Tensor:
        """Whether each query sees each of the block's keys, `[b, Hk, G, n, w]`."""
        b, n, w = block.shape
        alike = self.mask is None or self.mask.shape[1] == 1  # for all heads
        view = self.q.new_zeros((b, *((1, 1) if alike else (self.heads_kv, self.group)), n, w))
        self._hide_in(view, block)
        return (view != -math.inf).expand(b, self.heads_kv, self.group, n, w)

    def empty(self, block: Block, largest: Tensor) -> Tensor:
        """Whether each row sees no key, from the rows' largest logits; both `[b·Hk, G·n, 1]`.

        Logits of visible keys can overflow to -inf, too: such a row is NaN, and not empty.
        """
        empty = largest == -math.inf
        if self.device.type == "cpu" and not bool(empty.any()):
            return empty
        return ~self.seen(block).any(-1).view(largest.shape)

    def _hide_in(self, view: Tensor, block: Block) -> None:
        if self.mask is not None:
            part = self._masks(block.batch, block.rows, block.cols)
            if part.dtype == torch.bool:
                view.masked_fill_(~part, -math.inf)
            else:
                view.add_(part.to(self.dtype))
                view.masked_fill_(part <= torch.finfo(part.dtype).min, -math.inf)
        n, w = view.shape[3:]
        if self.ranges is not None:
            spans = self._spans(self.ranges, block.batch, block.rows) - block.cols.start
            start, stop = spans[:, None, None, ..., None].unbind(-2)
            parts = [(0, w)]
            if self.device.type == "cpu":  # all rows see most columns: skip these
                parts = [(0, min(int(start.max()), w)), (max(int(stop.min()), 0), w)]
            for lo, hi in parts:
                col = torch.arange(lo, max(lo, hi), device=self.device)
                view[..., lo : max(lo, hi)].masked_fill_((col < start) | (col >= stop), -math.inf)
        first = block.rows.start + self.keys - self.queries - block.cols.start  # the column of row 0's own key
        own = torch.arange(first, first + n, device=self.device)[:, None]
        if self.least is not None:
            lo = min(max(first + 1 - self.least, 0), w)
            view[..., lo:].masked_fill_(torch.arange(lo, w, device=self.device) > own - self.least, -math.inf)
        if self.most is not None:
            hi = min(max(first + n - 1 - self.most, 0), w)
            view[..., :hi].masked_fill_(torch.arange(hi, device=self.device) < own - self.most, -math.inf)

    def keep(self, block: Block) -> Tensor | None:
        """The block's dropout mask, `[b·Hk, G·n, w]`: 0, or 1/(1 − rate).

        A function of the seed, and on a CPU of head and rows: however the call is shared out, the mask is the same.
        """
        if self.seed is None:
            return None
        count = block.heads.stop - block.heads.start
        heads_at_once = 1 if self.device.type == "cpu" else count
        first, seed = self._keys_near(block.rows).start, int(self.seed)
        drawn = [
            self._drawn(seed, heads_at_once, head, block.rows)[..., block.cols.start - first : block.cols.stop - first]
            for head in range(block.heads.start, block.heads.stop, heads_at_once)
        ]
        return (torch.cat(drawn) >= self.options.dropout).to(self.dtype).div_(1 - self.options.dropout)

    def _drawn(self, seed: int, count: int, head: int, rows: slice) -> Tensor:
        """Uniform numbers for `count` heads of `[B·Hk]`, from `head` on: `[count, G·n, keys near the rows]`."""
        batch, head_kv = divmod(head, self.heads_kv)
        place = (batch + self.share.batch.start) * self.whole_kv + head_kv + self.share.heads_kv.start
        number = rows.start * self.whole_batch * self.whole_kv + place
        generator = torch.Generator(self.device).manual_seed((seed + number) % (1 << 63))
        near = self._keys_near(rows)
        shape = count, self.group * (rows.stop - rows.start), near.stop - near.start
        return torch.rand(shape, generator=generator, device=self.device, dtype=self.dtype)

    def sink_rows(self, block: Block) -> Tensor | None:
        """The sinks' logits for the block's rows, `[b·Hk, G·n, 1]`."""
        b, n, _ = block.shape
        return None if self.sinks is None else self.sinks.expand(-1, -1, n, 1).flatten(1, 2).repeat(b, 1, 1)


def _is_small(x: Tensor) -> bool:
    """Whether all of x is within SMALL; NaN is not."""
    least, most = map(float, x.aminmax())
    return least >= -SMALL and most <= SMALL
