"""The shapes, the random inputs and the implementations of the attention benchmark, and what they must give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_qknorm.ops import library, reference
from hf_qknorm.ops.types import Heads, Norm, Options, Rotary, Visible

EPS, SOFTCAP = 1e-6, 50.0


@dataclass(frozen=True)
class Case:
    """A causal shape; `keys` are those of a cache that one new query meets, a `prologue` is norm and RoPE alone."""

    heads: int
    heads_kv: int
    head_dim: int
    length: int
    batch: int = 1
    keys: int | None = None
    prologue: bool = False

    def __str__(self) -> str:
        kind = "decode" if self.keys else "norm and RoPE" if self.prologue else "attention"
        sizes = f"{self.heads}/{self.heads_kv}×{self.head_dim}, {self.batch} × {self.keys or self.length:,}"
        return f"{kind} {sizes}"

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
        flop = 2 * self.batch * self.length**2 * self.heads * self.head_dim
        return flop * {"forward": 1, "backward": 2.5, "both": 3.5}[kind] / 1e9, "TFLOP/s"

    def short(self, length: int) -> Case:
        """The case at a length that the oracle in fp64 can take."""
        if self.keys is not None:
            return replace(self, batch=2, keys=2 * length + 205)
        return replace(self, batch=2, length=length)


class Inputs(NamedTuple):
    """The inputs of every implementation; angles `[1, T, D]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    q_gain: Tensor
    k_gain: Tensor
    cos: Tensor
    sin: Tensor

    def leaves(self, names: tuple[str, ...]) -> Inputs:
        """The inputs, detached; those in `names` require gradients."""
        fields = self._asdict().items()
        return Inputs(*(x.detach().requires_grad_(name in names) for name, x in fields))


def draw(case: Case, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Random inputs, with heads laid out as projections leave them."""
    generator = torch.Generator(device).manual_seed(seed)
    random = partial(torch.randn, device=device, dtype=dtype, generator=generator)

    def heads(count: int, length: int) -> Tensor:
        return random(case.batch, length, count, case.head_dim).transpose(1, 2)

    places, keys = torch.arange(case.length, device=device), case.keys or case.length
    steps = torch.arange(0, case.head_dim, 2, device=device) / case.head_dim
    angles = torch.cat([places[:, None] * 10_000.0**-steps] * 2, -1)[None]
    gains = [random(case.head_dim).mul(0.1).add(1) for _ in range(2)]
    q, k, v, grad = (
        heads(*x) for x in ((case.heads, case.length), *((case.heads_kv, keys),) * 2, (case.heads, case.length))
    )
    return Inputs(q, k, v, grad, *gains, angles.cos().to(dtype), angles.sin().to(dtype))


@dataclass(frozen=True)
class Implementation:
    """One implementation, and what it computes: norms and RoPE, and a cap."""

    name: str
    attend: Callable[[Case, Inputs], Any]  # gives the output; of a prologue, queries and keys
    normed: bool = False
    softcap: float | None = None
    differentiable: bool = True

    @property
    def ours(self) -> bool:
        return self.name.startswith("ours")

    def leaves(self, case: Case) -> tuple[str, ...]:
        """The inputs that require gradients; none of a step of generation."""
        if case.keys is not None or not self.differentiable:
            return ()
        values = () if case.prologue else ("v",)
        return ("q", "k", *values, "q_gain", "k_gain") if self.normed else ("q", "k", *values)


def ours(case: Case, x: Inputs, *, normed: bool = True, softcap: float | None = SOFTCAP) -> Tensor:
    heads = normed_heads(x) if normed else Heads(x.q, x.k, x.v)
    return library.fused_attention(heads, Visible(), Options(x.q.shape[-1] ** -0.5, softcap, True))


def normed_heads(x: Inputs) -> Heads:
    half = x.cos.shape[-1] // 2
    norms = Norm("rms", x.q_gain, eps=EPS), Norm("rms", x.k_gain, eps=EPS)
    return Heads(x.q, x.k, x.v, *norms, Rotary(x.cos[..., :half], x.sin[..., :half]))


def sdpa(case: Case, x: Inputs, *, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        grouped = x.q.shape[1] != x.k.shape[1]
        return F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=case.keys is None, enable_gqa=grouped)


FLASH = Implementation("SDPA flash, plain", partial(sdpa, backend=SDPBackend.FLASH_ATTENTION))
CUDNN = Implementation("SDPA cuDNN, plain", partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION))
OURS = Implementation("ours: norm, RoPE, cap", ours, True, SOFTCAP)
UNCAPPED = Implementation("ours: norm, RoPE", partial(ours, softcap=None), True)
CAPPED = Implementation("ours: cap", partial(ours, normed=False), softcap=SOFTCAP)
COPY = Implementation("a copy of q and k", lambda case, x: (x.q.clone(), x.k.clone()), differentiable=False)
PROLOGUE = Implementation("ours: norm, RoPE", lambda case, x: library.norm_rope(normed_heads(x)), True)
WIDE, NARROW = (32, 8, 128), (32, 8, 64)
CASES: list[tuple[Case, tuple[Implementation, ...]]] = [
    *((Case(*shape, 4096, 4), (FLASH, OURS, UNCAPPED, CUDNN)) for shape in (WIDE, NARROW)),
    (Case(*WIDE, 4096, 4, prologue=True), (COPY, PROLOGUE)),
    (Case(*WIDE, 1, 16, keys=32_768), (FLASH, CAPPED)),
    *((Case(*shape, 4096, 4), (FLASH, OURS)) for shape in ((8, 4, 256), (16, 16, 96))),
    *((Case(*WIDE, length, 16_384 // length), (FLASH, OURS, CUDNN)) for length in (1024, 16_384)),
]  # fmt: skip
TINY: list[tuple[Case, tuple[Implementation, ...]]] = [
    (Case(2, 1, 16, 40), (FLASH, OURS, UNCAPPED, CUDNN)),
    (Case(2, 1, 16, 40, prologue=True), (COPY, PROLOGUE)),
    (Case(2, 1, 16, 1, 2, keys=300), (FLASH, CAPPED)),
]


def results(attend: Callable[[Inputs], Any], x: Inputs, names: tuple[str, ...]) -> dict[str, Tensor]:
    """The output, joined if it is two, and the gradients of `names`."""
    x = x.leaves(names)
    out = attend(x)
    out = torch.cat(out, 1) if isinstance(out, tuple) else out
    grad = x.grad if out.shape == x.grad.shape else torch.cat([x.grad, x.v.detach()], 1)
    gradients = torch.autograd.grad(out, [getattr(x, name) for name in names], grad) if names else ()
    return {"out": out.detach(), **{f"d{name}": y for name, y in zip(names, gradients, strict=True)}}


def oracle(case: Case, x: Inputs, normed: bool, softcap: float | None) -> Tensor:
    """Attention by the reference implementation, in the dtype of the inputs."""
    q, k = x.q, x.k
    if normed:
        q, k = (rotated(reference.head_norm(y, "rms", g, eps=EPS), x) for y, g in ((q, x.q_gain), (k, x.k_gain)))
    if case.prologue:
        return torch.cat([q, k], 1)
    return reference.attention(q, k, x.v, softcap=softcap, causal=True).out


def rotated(y: Tensor, x: Inputs) -> Tensor:
    """y `[B, H, T, D]` turned by the angles, as in transformers."""
    first, second = y.chunk(2, -1)
    return y * x.cos[:, None] + torch.cat([-second, first], -1) * x.sin[:, None]
