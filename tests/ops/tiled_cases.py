"""Problems for the tiled attention, and what it and the oracle make of them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_qknorm.ops import reference, tiled
from hf_qknorm.testing import make_qkv


@dataclass(frozen=True)
class Case:
    """One attention problem; `mask` names one of `draw_mask`'s."""

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
    sinks: bool = False
    dropout: float = 0.0
    spread: float = 1.0

    def __str__(self) -> str:
        fields = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        return "-".join(f"{field.name}={value}" for field, value in fields if value != field.default) or "plain"

    @property
    def options(self) -> tiled.Options:
        return tiled.Options(self.head_dim**-0.5, self.softcap, self.causal, self.window, self.dropout)


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case, q, k, v and sinks with gradients."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    sinks: Tensor | None
    seed: Tensor | None
    grad: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers in another dtype."""

        def cast(x: Tensor | None) -> Tensor | None:
            return x if x is None or x.dtype == torch.bool else x.detach().to(dtype).requires_grad_(x.requires_grad)

        mask = self.mask
        if mask is not None and mask.dtype != torch.bool:  # finfo.min is another number in another dtype
            hidden = mask <= torch.finfo(mask.dtype).min
            mask = mask.to(dtype).masked_fill(hidden, torch.finfo(dtype).min)
        return Inputs(*(cast(x) for x in (self.q, self.k, self.v)), mask, cast(self.sinks), self.seed, cast(self.grad))


def draw_inputs(case: Case, dtype: torch.dtype) -> Inputs:
    """The case's tensors, rounded to `dtype`."""
    keys = case.keys or case.queries
    q, k, v = make_qkv(
        case.batch, case.heads, case.heads_kv, case.queries, keys, case.head_dim, dtype=dtype, spread=case.spread
    )
    sinks = torch.linspace(-2, 3, case.heads, dtype=torch.float64).to(dtype).requires_grad_() if case.sinks else None
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    seed = torch.tensor([1234]) if case.dropout else None
    mask = None if case.mask is None else draw_mask(case.mask, (case.batch, case.heads, case.queries, keys), dtype)
    return Inputs(q, k, v, mask, sinks, seed, grad)


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


def tiled_results(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """Output and gradients of `tiled`."""
    with torch.no_grad():
        tensors = (inputs.q, inputs.k, inputs.v, inputs.mask, inputs.sinks, inputs.seed)
        out, lse = tiled.forward(*tensors, case.options)
        grads = tiled.backward(inputs.grad, *tensors, out, lse, case.options)
    return named(out, *grads)


def oracle_results(case: Case, inputs: Inputs, dropout_mask: Tensor | None = None) -> dict[str, Tensor]:
    """Output and gradients of the oracle, in the dtype of the inputs."""
    result = reference.attention(
        inputs.q,
        inputs.k,
        inputs.v,
        softcap=case.softcap,
        causal=case.causal,
        window=case.window,
        mask=inputs.mask,
        sinks=inputs.sinks,
        dropout_mask=dropout_mask,
    )
    wanted = [x for x in (inputs.q, inputs.k, inputs.v, inputs.sinks) if x is not None]
    return named(result.out.detach(), *torch.autograd.grad(result.out, wanted, inputs.grad))


def named(out: Tensor, *grads: Tensor | None) -> dict[str, Tensor]:
    """The tensors that are there, by name."""
    names = ("out", "dq", "dk", "dv", "dsinks")
    return {name: x for name, x in zip(names, (out, *grads), strict=False) if x is not None}
