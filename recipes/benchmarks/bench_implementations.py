"""The implementations under test: our variants, and torch's SDPA. `bench_rivals` has others.

Each declares its computation (norm and RoPE, cap, gains), and is checked against exactly that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from bench_cases import EPS, SOFTCAP, Case, Inputs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from hf_qknorm.ops import library
from hf_qknorm.ops.triton import gluon
from hf_qknorm.ops.types import Heads, Norm, Options, Rotary, Visible

LARGE_GAIN = 3.0  # gains that drive the bound of the logits over the limits of the fast loops
Attend = Callable[[Case, Inputs], Any]  # gives the output; of a prologue, queries and keys


def nothing(case: Case, x: Inputs) -> None:
    return None


def available(case: Case, device: str) -> str | None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One implementation of attention; `mask` builds its mask, `missing` says why it cannot run."""

    name: str
    attend: Attend
    normed: bool = False
    softcap: float | None = None
    gain: float = 1.0
    mask: Callable[[Case, Inputs], Any] = nothing
    missing: Callable[[Case, str], str | None] = available
    one_way: str | None = None  # why it has no backward pass
    one_way_on_cpu: str | None = None
    repeat: bool = False  # keys and values, for each query head, before the clock runs
    compiled: bool = False  # by torch.compile, for each shape anew

    @property
    def ours(self) -> bool:
        return self.name.startswith("ours")

    def leaves(self, case: Case, device: str) -> tuple[str, ...]:
        """Return the inputs that require gradients; none without a backward pass."""
        if case.keys is not None or self.forward_only(device):
            return ()
        values = () if case.prologue else ("v",)
        return ("q", "k", *values, "q_gain", "k_gain") if self.normed else ("q", "k", *values)

    def forward_only(self, device: str) -> str | None:
        """Return the reason for the absence of a backward pass, or None."""
        return self.one_way or (self.one_way_on_cpu if device == "cpu" else None)

    def prepared(self, case: Case, copies: list[Inputs]) -> list[Inputs]:
        """Return its inputs as leaves, with its gains and its mask."""
        first = copies[0]
        names = self.leaves(case, first.q.device.type)
        shared = {
            "q_gain": first.q_gain * self.gain,
            "k_gain": first.k_gain * self.gain,
            "mask": self.mask(case, first),
        }
        return [self.laid_out(case, x)._replace(**shared).leaves(names) for x in copies]

    def laid_out(self, case: Case, x: Inputs) -> Inputs:
        group = case.heads // case.heads_kv
        if self.repeat and group > 1:
            k, v = (y.transpose(1, 2).repeat_interleave(group, 2).transpose(1, 2) for y in (x.k, x.v))
            x = x._replace(k=k, v=v)
        return x


def norms(x: Inputs) -> tuple[Norm, Norm]:
    return Norm("rms", x.q_gain, eps=EPS), Norm("rms", x.k_gain, eps=EPS)


def rotary(x: Inputs) -> Rotary:
    half = x.cos.shape[-1] // 2
    return Rotary(x.cos[..., :half], x.sin[..., :half])


def ours(case: Case, x: Inputs, *, normed: bool = True, softcap: float | None = SOFTCAP) -> Tensor:
    heads = Heads(x.q, x.k, x.v, *norms(x), rotary(x)) if normed else Heads(x.q, x.k, x.v)
    options = Options(x.q.shape[-1] ** -0.5, softcap, causal=True, window=case.window)
    return library.fused_attention(heads, Visible(), options)


def our_variant(name: str, normed: bool = True, softcap: float | None = SOFTCAP, gain: float = 1.0) -> Implementation:
    return Implementation(name, partial(ours, normed=normed, softcap=softcap), normed, softcap, gain)


def plain_kernel(case: Case, x: Inputs, *, softcap: float | None) -> Tensor:
    """`ours` without the Gluon kernel, which each call looks for anew."""
    before = os.environ.get(gluon.SWITCH, "1")
    os.environ[gluon.SWITCH] = "0"
    try:
        return ours(case, x, softcap=softcap)
    finally:
        os.environ[gluon.SWITCH] = before


def plain_variant(name: str, softcap: float | None) -> Implementation:
    return Implementation(name, partial(plain_kernel, softcap=softcap), True, softcap)


def sdpa(case: Case, x: Inputs, *, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        grouped = x.q.shape[1] != x.k.shape[1]
        return F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=case.keys is None, enable_gqa=grouped)


def varlen(case: Case, x: Inputs) -> Tensor:
    """torch's function for packed sequences and windows; it is flash attention too."""
    boundaries = torch.arange(case.batch + 1, dtype=torch.int32, device=x.q.device) * case.length
    q, k, v = (y.transpose(1, 2).flatten(0, 1) for y in (x.q, x.k, x.v))
    window = (case.window - 1 if case.window else -1, 0)
    out = varlen_attn(q, k, v, boundaries, boundaries, case.length, case.length, window_size=window, **GROUPED)
    return out.view(case.batch, case.length, *out.shape[1:]).transpose(1, 2)


# newer versions need a flag for grouped heads
GROUPED: Final = {"enable_gqa": True} if "enable_gqa" in (varlen_attn.__kwdefaults__ or {}) else {}


def on_gpus(case: Case, device: str) -> str | None:
    return "needs a GPU" if device == "cpu" else None


def our_prologue(case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
    return library.norm_rope(Heads(x.q, x.k, x.v, *norms(x), rotary(x)))


def prologue(function: Callable[[Inputs], tuple[Tensor, Tensor]], case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
    return function(x)


FLASH = Implementation("SDPA flash, plain", partial(sdpa, backend=SDPBackend.FLASH_ATTENTION))
VARLEN = Implementation("varlen_attn (flash), plain", varlen, missing=on_gpus)
CUDNN = Implementation("SDPA cuDNN, plain", partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION), missing=on_gpus)
CUDNN_REPEATED = replace(CUDNN, name="SDPA cuDNN, plain, K and V repeated before", repeat=True)
OURS = our_variant("ours: norm, RoPE, cap")
OURS_UNCAPPED = our_variant("ours, no cap (no maximum)", softcap=None)
PLAIN: Final = (
    plain_variant("ours, plain kernel: norm, RoPE, cap", SOFTCAP),
    plain_variant("ours, plain kernel, no cap (no maximum)", None),
)
ARMS: Final = (  # and the inner loops that they take
    our_variant("ours, gains of 3 (tanh.approx)", gain=LARGE_GAIN),
    OURS_UNCAPPED,
    our_variant("ours, no cap, gains of 3 (online)", softcap=None, gain=LARGE_GAIN),
    our_variant("ours, no norm (tanh.approx, one launch)", normed=False),
    our_variant("ours, neither (online, one launch)", normed=False, softcap=None),
)
DECODING = our_variant("ours: cap", normed=False)
COPY = Implementation("a copy of q and k", lambda case, x: (x.q.clone(), x.k.clone()), one_way="a copy has none")
PROLOGUE = Implementation("ours: norm, RoPE", our_prologue, normed=True)
