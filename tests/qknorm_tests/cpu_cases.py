"""Problems for the C++ kernels: their results and dropout, plain results in linear memory."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_qknorm.ops import reference
from hf_qknorm.ops.cpu import attention
from hf_qknorm.ops.types import Call, Heads
from qknorm_tests.tiled_cases import Case, Inputs, named

WORD = (1 << 32) - 1


def cpu_results(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """Output and gradients of the kernels."""
    with torch.enable_grad():
        out = attention.attention(Call(inputs.heads, inputs.visible, case.options))
    wanted = [x for x in (inputs.q, inputs.k, inputs.v, inputs.sinks) if x is not None]
    return named(out.detach(), *torch.autograd.grad(out, wanted, inputs.grad))


def linear_memory_terms(case: Case, inputs: Inputs, dropout_mask: Tensor | None) -> dict[str, Tensor]:
    """`oracle_terms` with the softmax's derivative by the formula of linear memory, p·(dp - grad·out), in plain fp32.

    Autograd has p·(dp - Σ p·dp), which needs all dp of a query at once. There the rounding of a dp cancels where its
    weight p is near 1. In the formula that FlashAttention introduced (Dao et al. 2022, appendix B.2), and every
    attention in linear memory has, it meets that of grad·out, of the output as it is kept in the dtype of the heads.
    """
    wide, group = inputs.to(torch.float32), case.heads // case.heads_kv
    grad, v = wide.grad, wide.v.detach().repeat_interleave(group, 1)
    kept = torch.ones(()) if dropout_mask is None else dropout_mask.float()
    with torch.no_grad():
        sinks = None if wide.sinks is None else wide.sinks.double()
        double = Heads(*(x.double() for x in wide.heads[:3]))
        exact = reference.attend(double, wide.visible._replace(sinks=sinks), case.options).weights
        found = reference.attend(wide.heads, wide.visible, case.options, kept)
        delta = (grad * found.out.to(inputs.q.dtype)).sum(-1, keepdim=True)
        dlogits = found.weights * ((grad @ v.mT) * kept - delta)
        dv = ((found.weights * kept).mT @ grad).unflatten(1, (-1, group)).sum(2)
    logits = case.options.scale * (wide.q @ wide.k.repeat_interleave(group, 1).mT)
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    dq, dk = torch.autograd.grad(logits, (wide.q, wide.k), dlogits)
    seen = exact.sum(-1)
    dsinks = None if sinks is None else (-(1 - seen) * (seen > 0) * delta[..., 0]).transpose(1, 2)
    return named(*(x.to(inputs.q.dtype) for x in (found.out, dq, dk, dv)), dsinks)


def mix64(x: int) -> int:
    """splitmix64."""
    word = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & word
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & word
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & word
    return x ^ (x >> 31)


def mix32(x: Tensor) -> Tensor:
    """lowbias32 of unsigned numbers."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & WORD
    x = x ^ (x >> 15)
    x = ((x * (0x846CA68B >> 16) & WORD) * (1 << 16) + x * (0x846CA68B & 0xFFFF)) & WORD  # int64 must not overflow
    return x ^ (x >> 16)


def cpu_dropout(case: Case, inputs: Inputs) -> Tensor | None:
    """The factors of the weights `[B, H, T, S]`: a hash of seed and row, and one of that and the key."""
    if inputs.seed is None:
        return None
    shape = (case.batch, case.heads, case.queries)
    mixed = [mix64((int(inputs.seed) + mix64(row)) & ((1 << 64) - 1)) for row in range(torch.Size(shape).numel())]
    low, high = (torch.tensor([x >> shift & WORD for x in mixed]).view(*shape, 1) for shift in (0, 32))
    keys = torch.arange(case.queries if case.keys is None else case.keys)
    drawn = mix32(mix32((low + keys) & WORD) ^ high)
    return (drawn >= round(case.dropout * 2**32)).to(inputs.q.dtype) / (1 - case.dropout)
