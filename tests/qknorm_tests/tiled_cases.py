"""Problems for the tiled attention, and their results from it and from the oracle."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_qknorm.ops import library, reference, tiled
from hf_qknorm.ops.types import Heads, Options, Visible
from qknorm_tests.random_qkv import make_qkv


@dataclass(frozen=True)
class Case:
    """One attention problem; `mask` and `ranges` name one of `draw_mask`'s and `draw_ranges`'."""

    batch: int = 2
    heads: int = 4
    heads_kv: int = 2
    queries: int = 63
    keys: int | None = None
    head_dim: int = 16
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    mask: str | None = None
    ranges: str | None = None
    sinks: bool = False
    dropout: float = 0.0
    spread: float = 1.0

    def __str__(self) -> str:
        fields = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        return "-".join(f"{field.name}={value}" for field, value in fields if value != field.default) or "plain"

    @property
    def options(self) -> Options:
        return Options(self.head_dim**-0.5, self.softcap, self.causal, self.window, self.dropout)


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case, q, k, v and sinks with gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    ranges: Tensor | None
    sinks: Tensor | None
    seed: Tensor | None
    grad: Tensor

    @property
    def heads(self) -> Heads:
        return Heads(self.q, self.k, self.v)

    @property
    def visible(self) -> Visible:
        return Visible(self.ranges, self.sinks, self.seed, self.mask)

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers in another dtype."""

        def cast(x: Tensor | None) -> Tensor | None:
            return x if x is None or x.dtype == torch.bool else x.detach().to(dtype).requires_grad_(x.requires_grad)

        mask = self.mask
        if mask is not None and mask.dtype != torch.bool:  # finfo.min is another number in another dtype
            hidden = mask <= torch.finfo(mask.dtype).min
            mask = mask.to(dtype).masked_fill(hidden, torch.finfo(dtype).min)
        q, k, v, sinks, grad = (cast(x) for x in (self.q, self.k, self.v, self.sinks, self.grad))
        return Inputs(q, k, v, mask, self.ranges, sinks, self.seed, grad)


def draw_inputs(case: Case, dtype: torch.dtype) -> Inputs:
    """The case's tensors, rounded to `dtype`."""
    keys = case.queries if case.keys is None else case.keys
    q, k, v = make_qkv(
        case.batch, case.heads, case.heads_kv, case.queries, keys, case.head_dim, dtype=dtype, spread=case.spread
    )
    sinks = torch.linspace(-2, 3, case.heads, dtype=torch.float64).to(dtype).requires_grad_() if case.sinks else None
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    seed = torch.tensor([1234]) if case.dropout else None
    full = (case.batch, case.heads, case.queries, keys)
    mask = None if case.mask is None else draw_mask(case.mask, full, dtype)
    ranges = None if case.ranges is None else draw_ranges(case.ranges, case.batch, case.queries, keys)
    return Inputs(q, k, v, mask, ranges, sinks, seed, grad)


def draw_mask(kind: str, full: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """A mask by name: `bool:B1TS` is boolean and `[B, 1, T, S]`, `add:` additive; or a padded, packed or empty one."""
    kind, _, axes = kind.partition(":")
    positions = torch.arange(full[3])
    lengths = torch.tensor([full[3] - 7 * b for b in range(full[0])]).clamp_min(1).view(-1, 1, 1, 1)
    match kind:
        case "right_padding":
            return (positions < lengths).expand(-1, 1, full[2], -1)
        case "left_padding":
            causal = reference.visible(full[2], full[3], causal=True)
            return (positions >= full[3] - lengths) & causal
        case "packed":
            return ((positions // 20)[:, None] == positions // 20).expand(full[0], 1, -1, -1)
        case "nothing":
            return torch.zeros(1, 1, *full[2:], dtype=torch.bool)
    shape = [size if letter != "1" else 1 for letter, size in zip(axes, full, strict=True)]
    generator = torch.Generator().manual_seed(2)
    seen = torch.rand(shape, generator=generator) < 0.6
    if kind == "bool":
        return seen
    bias = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.where(seen, bias, -math.inf if kind == "inf" else torch.finfo(dtype).min)


def draw_ranges(kind: str, batch: int, queries: int, keys: int) -> Tensor:
    """Ranges by name, `[B or 1, T, 2]` and int32: each entry of the batch has 7 keys fewer than the one before."""
    row, short = torch.arange(queries), 7 * torch.arange(1 if kind == "shared" else batch)[:, None]
    own, zero = row + keys - queries + 1, torch.zeros_like(row)
    match kind:
        case "left_padding" | "shared":
            start, stop = short + zero, own + 0 * short
        case "right_padding":
            start, stop = 0 * short + zero, (keys - short) + zero
        case "packed":
            start = (row + short) // 20 * 20
            stop = start + 20
        case "window":
            start, stop = own - 5 - short, own.minimum(keys - short)
        case "nothing":
            start, stop = short + zero, short + zero
        case _:
            raise ValueError(f"no ranges are called {kind!r}")
    return torch.stack([start, stop], -1).to(torch.int32)


def drawn_dropout(case: Case, inputs: Inputs) -> Tensor | None:
    """The dropout mask that `tiled` multiplies the weights by, if the case has dropout."""
    if inputs.seed is None:
        return None
    return dropout_mask(inputs.heads, inputs.visible, case.options)


@torch.no_grad()
def dropout_mask(heads: Heads, visible: Visible, options: Options) -> Tensor:
    """The mask `[B, H, T, S]` that `tiled` multiplies the weights by; 0 for keys that no block reads."""
    mask = heads.q.new_zeros((*heads.q.shape[:3], heads.k.shape[2]))
    for block in tiled._blocks(heads, visible, options):
        part = mask[:, :, block.rows, block.near]
        part.copy_(tiled.dropout_factors(part, block.rows.start, visible.seed, options.dropout))
    return mask


def tiled_results(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """Output and gradients of `tiled`."""
    with torch.enable_grad():
        out = library.attention(inputs.heads, inputs.visible, case.options)
    wanted = [x for x in (inputs.q, inputs.k, inputs.v, inputs.sinks) if x is not None]
    return named(out.detach(), *torch.autograd.grad(out, wanted, inputs.grad))


def oracle_results(case: Case, inputs: Inputs, dropout_mask: Tensor | None = None) -> dict[str, Tensor]:
    """Output and gradients of the oracle, in the dtype of the inputs."""
    found = oracle_terms(case, inputs, dropout_mask)
    return found if inputs.sinks is None else found | {"dsinks": found["dsinks"].sum((0, 1)).to(inputs.sinks.dtype)}


def oracle_terms(case: Case, inputs: Inputs, dropout_mask: Tensor | None = None) -> dict[str, Tensor]:
    """`oracle_results` with each query's share of the sinks' gradient, `[B, T, H]`, as error budgets take it."""
    sinks = None
    if inputs.sinks is not None:
        precision = torch.promote_types(inputs.sinks.dtype, torch.float32)
        shape = (case.batch, case.queries, case.heads)
        sinks = inputs.sinks.detach().to(precision).expand(shape).requires_grad_()
    visible = inputs.visible._replace(sinks=None if sinks is None else sinks.transpose(1, 2))
    out = reference.attend(inputs.heads, visible, case.options, dropout_mask).out
    wanted = [x for x in (inputs.q, inputs.k, inputs.v, sinks) if x is not None]
    return named(out.detach(), *torch.autograd.grad(out, wanted, inputs.grad))


def named(out: Tensor, *grads: Tensor | None) -> dict[str, Tensor]:
    """The tensors that are there, by name."""
    names = ("out", "dq", "dk", "dv", "dsinks")
    return {name: x for name, x in zip(names, (out, *grads), strict=False) if x is not None}
