"""Attention problems, and the output and gradients of each implementation and of the oracle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_qknorm.ops import library, reference, tiled
from hf_qknorm.ops.cpu import attention as cpu
from hf_qknorm.ops.error_budget import verdict
from hf_qknorm.ops.types import Call, Heads, Options, Visible
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.norm_cases import DEVICE, draw, lay_out, parameters, spread, with_parameters
from qknorm_tests.norm_cases import Case as Raw
from qknorm_tests.random_qkv import make_qkv

Attend = Callable[[Call], Tensor]


@dataclasses.dataclass(frozen=True)
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


class Problem(NamedTuple):
    """A call, and the gradient of its output."""

    heads: Heads
    visible: Visible
    options: Options
    grad: Tensor

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors with a gradient."""
        q, k, v, q_norm, k_norm, _ = self.heads
        named = {"q": q, "k": k, "v": v, **parameters(q_norm, k_norm), "sinks": self.visible.sinks}
        return {name: x for name, x in named.items() if x is not None}

    def call(self, leaves: dict[str, Tensor]) -> Call:
        """The call of these tensors, in place of its own."""
        visible = self.visible._replace(sinks=leaves.get("sinks"))
        return Call(with_parameters(self.heads, leaves), visible, self.options)

    def results(self, attend: Attend) -> dict[str, Tensor]:
        """Output and gradients of an implementation."""
        leaves = {name: x.detach().requires_grad_() for name, x in self.leaves.items()}
        with torch.enable_grad():
            out = attend(self.call(leaves))
        return {"out": out.detach(), **self._gradients(out, leaves)}

    def _gradients(self, out: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(leaves, torch.autograd.grad(out, [*leaves.values()], self.grad.to(out.dtype)), strict=True))

    def attended(self, leaves: dict[str, Tensor], dropped: Tensor | None = None) -> reference.Attended:
        """The oracle's attention for leaves as `spread` makes them."""
        heads, visible, options = self.call(leaves)
        sinks = None if visible.sinks is None else visible.sinks.mT
        return reference.attend(heads, visible._replace(sinks=sinks), options, dropped)

    def exactly(self) -> reference.Attended:
        """The oracle in fp64, without gradients."""
        return self.attended({name: x.detach() for name, x in spread(self.leaves, torch.float64).items()})

    def expected(self, dtype: torch.dtype, dropped: Tensor | None = None) -> dict[str, Tensor]:
        """The oracle's output and gradients in `dtype`; for parameters the terms of sums that `verdict` needs."""
        leaves = spread(self.leaves, dtype)
        out = self.attended(leaves, None if dropped is None else dropped.to(dtype)).out
        return {"out": out.detach(), **self._gradients(out, leaves)}

    def check(self, implementation: Implementation) -> dict[str, Tensor]:
        """Assert that output and gradients are within the budget of the implementation; return them."""
        dropped = drawn(self, implementation.attend)
        exact, plain = self.expected(torch.float64, dropped), [x(self, dropped) for x in implementation.plain]
        got = self.results(implementation.attend)
        assert got.keys() == exact.keys()
        for name, x in got.items():
            assert x.dtype == self.grad.dtype
            assert x.shape == (self.grad if name == "out" else self.leaves[name]).shape
            assert_exact(x, exact[name], [found[name] for found in plain], name)
        return got

    def in_dtype(self, dropped: Tensor | None) -> dict[str, Tensor]:
        """Plain attention in the dtype of the heads."""
        return self.expected(self.grad.dtype, dropped)

    def rounded_once(self, dropped: Tensor | None) -> dict[str, Tensor]:
        """Plain attention in fp32, and its results in the dtype of the heads."""
        found = self.expected(torch.float32, dropped)
        return {name: x.to(self.grad.dtype) if name in ("out", *"qkv") else x for name, x in found.items()}

    def in_linear_memory(self, dropped: Tensor | None) -> dict[str, Tensor]:
        """`in_dtype` with the softmax's derivative by the formula of linear memory, p·(dp - grad·out), in plain fp32.

        Autograd has p·(dp - Σ p·dp), which needs all dp of a query at once. There the rounding of a dp cancels where
        its weight p is near 1. In the formula that FlashAttention introduced (Dao et al. 2022, appendix B.2), and every
        attention in linear memory has, it meets that of grad·out, of the output as it is kept in the dtype of heads.
        """
        dtype, (scale, cap, *_) = self.heads.q.dtype, self.options
        leaves, exact = spread(self.leaves, torch.float32), self.exactly().weights
        q, k, v, grad = (x.detach() for x in (leaves["q"], leaves["k"], leaves["v"], self.grad.float()))
        kept, group = torch.ones(()) if dropped is None else dropped.float(), q.shape[1] // k.shape[1]
        found = self.attended({name: x.detach() for name, x in leaves.items()}, kept)
        delta = (grad * found.out.to(dtype)).sum(-1, keepdim=True)
        dlogits = found.weights * ((grad @ v.repeat_interleave(group, 1).mT) * kept - delta)
        dv = ((found.weights * kept).mT @ grad).unflatten(1, (-1, group)).sum(2)
        logits = scale * (leaves["q"] @ leaves["k"].repeat_interleave(group, 1).mT)
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        dq, dk = torch.autograd.grad(logits, (leaves["q"], leaves["k"]), dlogits)
        seen = exact.sum(-1)
        dsinks = (-(1 - seen) * (seen > 0) * delta[..., 0]).transpose(1, 2)
        return {name: x.to(dtype) for name, x in zip(("out", *"qkv"), (found.out, dq, dk, dv), strict=True)} | {
            "sinks": dsinks
        }


def assert_exact(x: Tensor, exact: Tensor, plain: list[Tensor], what: str) -> None:
    """Within one of the budgets; where the exact result is zero, as the gradients of a single key, nearly zero."""
    if exact.any():
        plain = [found for found in plain if found.isfinite().all()]  # in fp16 sums overflow
        assert_within_budget(x, exact, min(plain, key=lambda found: -verdict(x, exact, found).budget), what)
    else:
        rounding = max(float(found.abs().max()) if found.numel() else 0.0 for found in plain)
        assert x.isfinite().all(), what
        assert not (x.abs() > 2 * rounding + 64 * torch.finfo(torch.float32).eps).any(), what


def problem(case: Case, dtype: torch.dtype, device: torch.device | str = "cpu") -> Problem:
    """The case's tensors, rounded to `dtype`, without norm and RoPE."""
    keys = case.queries if case.keys is None else case.keys
    q, k, v = make_qkv(
        case.batch, case.heads, case.heads_kv, case.queries, keys, case.head_dim, dtype=dtype, spread=case.spread
    )
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    visible = Visible(
        None if case.ranges is None else draw_ranges(case.ranges, case.batch, case.queries, keys),
        torch.linspace(-2, 3, case.heads, dtype=torch.float64).to(dtype) if case.sinks else None,
        torch.tensor([1234]) if case.dropout else None,
        None if case.mask is None else draw_mask(case.mask, (case.batch, case.heads, case.queries, keys), dtype),
    )
    q, k, v, grad, *seen = (None if x is None else x.detach().to(device) for x in (q, k, v, grad, *visible))
    options = Options(case.head_dim**-0.5, case.softcap, case.causal, case.window, case.dropout)
    return Problem(Heads(q, k, v), Visible(*seen), options, grad)


def raw_problem(raw: Raw, case: Case, scale: float | None = None) -> Problem:
    """The norms and rotation, shape and dtype of `raw`, with the attention options of `case`."""
    made, (heads, heads_kv) = draw(raw), raw.heads
    shape = {"batch": raw.batch, "heads": heads, "heads_kv": heads_kv, "queries": raw.length, "head_dim": raw.head_dim}
    plain = problem(dataclasses.replace(case, **shape), raw.dtype, DEVICE)
    made = made._replace(v=lay_out(plain.heads.v, raw.layout))
    return plain._replace(heads=made, options=plain.options._replace(scale=scale or plain.options.scale))


def draw_mask(kind: str, full: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    """A mask by name: `bool:B1TS` is boolean and `[B, 1, T, S]`, `add:` additive; or a padded, packed or empty one."""
    kind, _, axes = kind.partition(":")
    positions = torch.arange(full[3])
    lengths = torch.tensor([full[3] - 7 * b for b in range(full[0])]).clamp_min(1).view(-1, 1, 1, 1)
    match kind:
        case "right_padding":
            return (positions < lengths).expand(-1, 1, full[2], -1)
        case "left_padding":
            return (positions >= full[3] - lengths) & reference.visible(full[2], full[3], causal=True)
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
    start, stop = {
        "left_padding": (short + zero, own + 0 * short),
        "shared": (short + zero, own + 0 * short),
        "right_padding": (0 * short + zero, (keys - short) + zero),
        "packed": ((row + short) // 20 * 20, (row + short) // 20 * 20 + 20),
        "window": (own - 5 - short, own.minimum(keys - short)),
        "nothing": (short + zero, short + zero),
    }[kind]
    return torch.stack([start, stop], -1).to(torch.int32)


def drawn(given: Problem, attend: Attend) -> Tensor | None:
    """The factors `[B, H, T, S]` of weights, if there is dropout: the output for equal logits and an identity as v."""
    if given.visible.seed is None:
        return None
    (batch, heads, queries, _), (_, heads_kv, keys, _) = given.heads.q.shape, given.heads.k.shape
    columns, like = -(-keys // 8) * 8, given.heads.q
    new = {"dtype": torch.promote_types(like.dtype, torch.float32), "device": like.device}
    q, k = (torch.zeros(batch, *rows, columns, **new) for rows in ((heads, queries), (heads_kv, keys)))
    v = torch.eye(keys, columns, **new).expand(k.shape).contiguous()
    visible = given.visible._replace(sinks=None, mask=None)
    with torch.no_grad():
        dropped, whole = (
            attend(Call(Heads(q, k, v), visible, given.options._replace(softcap=None, dropout=rate)))[..., :keys]
            for rate in (given.options.dropout, 0.0)
        )
    kept = dropped > 0
    return kept * (dropped / whole)[kept].double().mean().nan_to_num()


class Implementation(NamedTuple):
    """Its name, its attention, the largest logit and the mean entropy `[H]` of a problem, and the device of tensors.

    Its budget is that of the largest error of the `plain` computations.
    """

    name: str
    attend: Attend
    statistics: Callable[[Problem], tuple[Tensor, Tensor]]
    plain: tuple[Callable[[Problem, Tensor | None], dict[str, Tensor]], ...] = (Problem.in_dtype,)
    device: torch.device | str = "cpu"


def _of_rows(given: Problem) -> tuple[Tensor, Tensor]:
    found, seen = library.fused_statistics(*given[:3]), given.exactly().weights.sum(-1) > 0
    return found.largest.amax((0, 2)), found.entropy.sum((0, 2)) / seen.sum((0, 2)).clamp_min(1)


def _of_heads(measure: Any) -> Callable[[Problem], tuple[Tensor, Tensor]]:
    return lambda given: measure(*given[:3])[:2]


TILED = Implementation(
    "tiled", lambda call: library.attention(*call), _of_heads(tiled.head_statistics), (Problem.rounded_once,)
)
CPP = Implementation("cpp", cpu.attention, _of_heads(cpu.head_statistics), (Problem.in_dtype, Problem.in_linear_memory))
TRITON = Implementation("triton", lambda call: library.fused_attention(*call), _of_rows, device=DEVICE)
IMPLEMENTATIONS = {
    "tiled": TILED,
    "cpp": CPP,
    "triton": TRITON,
    "triton by pointers": TRITON,
}  # as without a copy engine
