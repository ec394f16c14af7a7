"""Shapes and random inputs of the attention benchmark, and the expected results.

Shapes: B batch, H query heads, Hk key/value heads, T queries, S keys, D head_dim. Queries, keys and values are views
`[B, H, T, D]` of `[B, T, H, D]`, as a model's projections give them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import test_helpers_path  # noqa: F401
import torch
from torch import Tensor

from hf_qknorm.ops import reference
from qknorm_tests.error_budget import Verdict, verdict

EPS = 1e-6
SOFTCAP = 50.0
LEAVES = ("q", "k", "v", "q_gain", "k_gain")
Results = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One shape, causal; `keys` are those of a cache that a new query meets, a `prologue` is norm and RoPE alone."""

    heads: int
    heads_kv: int
    head_dim: int
    length: int
    batch: int = 1
    window: int | None = None
    keys: int | None = None
    prologue: bool = False

    def __str__(self) -> str:
        shape = f"{self.heads}/{self.heads_kv}x{self.head_dim}"
        if self.keys is not None:
            return f"decode {shape} B{self.batch} S{self.keys}"
        kind = "window " if self.window else "prologue " if self.prologue else ""
        return f"{kind}{shape} B{self.batch} T{self.length}" + (f" W{self.window}" if self.window else "")

    @property
    def pairs(self) -> float:
        """Queries and keys that meet, in all sequences of the batch; half of a square for a causal one."""
        width = min(self.window or self.length, self.length)
        return self.batch * width * (self.length - width / 2)

    @property
    def flop(self) -> float:
        """Useful floating-point operations of the forward pass; the backward pass has 2.5 times as many."""
        return 4 * self.pairs * self.heads * self.head_dim

    def size(self, itemsize: int) -> int:
        """Bytes of queries, keys and values."""
        keys = self.heads_kv * (self.keys or self.length)
        return self.batch * (self.heads * self.length + 2 * keys) * self.head_dim * itemsize

    def work(self, kind: str, itemsize: int) -> tuple[float, str]:
        """The least work of a pass: operations in 10⁹, or bytes in 10⁶. Divided by milliseconds it is a rate."""
        if self.keys is not None:
            return self.size(itemsize) / 1e6, "GB/s"
        if self.prologue:  # reads and writes all; backward reads gradients too
            moved = self.batch * (self.heads + self.heads_kv) * self.length * self.head_dim * itemsize
            return moved * {"forward": 2, "backward": 3, "both": 5}[kind] / 1e6, "GB/s"
        return self.flop * {"forward": 1, "backward": 2.5, "both": 3.5}[kind] / 1e9, "TFLOP/s"

    def at(self, length: int) -> Case:
        """Return the case at a length that the fp64 oracle can take: odd sequence lengths, a window that hides keys."""
        if self.keys is not None:
            return replace(self, batch=2, keys=2 * length + 205)
        window = (16 * (length // 80) or length // 4) if self.window else None  # of 16, as real ones: the same kernel
        return replace(self, batch=2, length=length, window=window)


class Inputs(NamedTuple):
    """The inputs of every implementation."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    q_gain: Tensor
    k_gain: Tensor
    cos: Tensor
    sin: Tensor
    mask: object = None

    def leaves(self, names: tuple[str, ...]) -> Inputs:
        """Return the inputs, detached; those in `names` require gradients."""
        return self._replace(**{name: getattr(self, name).detach().requires_grad_(name in names) for name in LEAVES})


def draw(case: Case, copies: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> list[Inputs]:
    """Draw sets of random inputs; gains and angles are the same in all of them."""
    generator = torch.Generator(device).manual_seed(seed)

    def heads(count: int, length: int) -> Tensor:
        shape = (case.batch, length, count, case.head_dim)
        return torch.randn(shape, device=device, dtype=dtype, generator=generator).transpose(1, 2)

    def gain() -> Tensor:
        return torch.rand(case.head_dim, device=device, generator=generator).mul(0.4).add(0.8).to(dtype)

    keys = case.keys or case.length
    places = torch.arange(case.length, device=device)
    steps = torch.arange(0, case.head_dim, 2, device=device) / case.head_dim
    angles = torch.cat([places[:, None] * 10_000.0**-steps] * 2, -1)[None]  # [1, T, D]
    q_gain, k_gain, cos, sin = gain(), gain(), angles.cos().to(dtype), angles.sin().to(dtype)
    return [
        Inputs(
            heads(case.heads, case.length),
            heads(case.heads_kv, keys),
            heads(case.heads_kv, keys),
            heads(case.heads, case.length),
            q_gain,
            k_gain,
            cos,
            sin,
        )
        for _ in range(copies)
    ]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x `[B, H, T, D]` turned by the angles, as in transformers."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def oracle(case: Case, x: Inputs, normed: bool, softcap: float | None) -> Tensor:
    """Return the attention of the reference implementation, in the dtype of the inputs."""
    q, k = x.q, x.k
    if normed:
        q, k = (
            rotated(reference.head_norm(y, "rms", g, eps=EPS), x.cos, x.sin) for y, g in ((q, x.q_gain), (k, x.k_gain))
        )
    if case.prologue:
        return torch.cat([q, k], 1)
    options = {"softcap": softcap, "causal": True, "window": case.window}
    return reference.attention(q, k, x.v, **options).out


def results(attend: Callable[[Inputs], Tensor | tuple[Tensor, Tensor]], x: Inputs, names: tuple[str, ...]) -> Results:
    """The output of `attend(x)`, joined if it is two, and the gradients of `names`."""
    x = x.leaves(names)
    out = attend(x)
    out = torch.cat(out, 1) if isinstance(out, tuple) else out
    if not names:
        return {"out": out.detach()}
    grad = x.grad if out.shape == x.grad.shape else torch.cat([x.grad, x.v.detach()], 1)
    gradients = torch.autograd.grad(out, [getattr(x, name) for name in names], grad)
    return {"out": out.detach(), **{f"d{name}": y for name, y in zip(names, gradients, strict=True)}}


def exactly(x: Inputs) -> Inputs:
    """Return the inputs in fp64."""
    wide = {n: y.double() for n, y in x._asdict().items() if isinstance(y, Tensor) and y.is_floating_point()}
    return x._replace(**wide)


def judge(got: Results, exact: Results, eager: Results) -> dict[str, Verdict]:
    """The verdict on each result."""
    return {name: verdict(y, exact[name], eager[name]) for name, y in got.items()}
