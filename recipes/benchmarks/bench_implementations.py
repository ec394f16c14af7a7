"""The implementations under test: ours in its variants, torch's, transformers' and Liger's.

Each declares its computation (norm and RoPE, cap, gains), and is checked against exactly that.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.nn.functional as F
from bench_cases import EPS, SOFTCAP, Case, Inputs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from hf_qknorm.ops import library
from hf_qknorm.ops.types import Heads, Norm, Options, Rotary, Visible

LARGE_GAIN = 3.0  # gains that drive the bound of the logits over the limits of the fast loops
Attend = Callable[[Case, Inputs], Any]  # gives the output; of a prologue, queries and keys


def nothing(case: Case, x: Inputs) -> None:
    return None


def available(case: Case, device: str) -> str | None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One implementation of attention. `mask` builds its mask; `missing` returns the reason why it cannot run, or
    None.
    """

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
    copies: int | None = None  # of the inputs, at most: its own tensors fill memory

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
        return [self.repeated(case, x)._replace(**shared).leaves(names) for x in copies[: self.copies]]

    def repeated(self, case: Case, x: Inputs) -> Inputs:
        group = case.heads // case.heads_kv
        if not self.repeat or group == 1:
            return x
        k, v = (y.transpose(1, 2).repeat_interleave(group, 2).transpose(1, 2) for y in (x.k, x.v))
        return x._replace(k=k, v=v)


def norms(x: Inputs) -> tuple[Norm, Norm]:
    return Norm("rms", x.q_gain, eps=EPS), Norm("rms", x.k_gain, eps=EPS)


def rotary(x: Inputs) -> Rotary:
    half = x.cos.shape[-1] // 2
    return Rotary(x.cos[..., :half], x.sin[..., :half])


def ours(case: Case, x: Inputs, *, normed: bool = True, softcap: float | None = SOFTCAP) -> Tensor:
    heads = Heads(x.q, x.k, x.v, *norms(x), rotary(x)) if normed else Heads(x.q, x.k, x.v)
    options = Options(x.q.shape[-1] ** -0.5, softcap, causal=True, window=case.window)
    return library.fused_attention(heads, Visible(x.ranges), options)


def our_variant(name: str, normed: bool = True, softcap: float | None = SOFTCAP, gain: float = 1.0) -> Implementation:
    return Implementation(name, partial(ours, normed=normed, softcap=softcap), normed, softcap, gain)


def sdpa(case: Case, x: Inputs, *, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        grouped = x.q.shape[1] != x.k.shape[1]
        return F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=case.keys is None, enable_gqa=grouped)


def varlen(case: Case, x: Inputs) -> Tensor:
    """torch's function for packed sequences and windows; it is flash attention too."""
    longest = max(case.lengths or (case.length,))
    q, k, v = (y.transpose(1, 2).flatten(0, 1) for y in (x.q, x.k, x.v))
    window = (case.window - 1 if case.window else -1, 0)
    out = varlen_attn(q, k, v, x.boundaries, x.boundaries, longest, longest, window_size=window, **GROUPED)
    return out.view(case.batch, case.length, *out.shape[1:]).transpose(1, 2)


# newer versions need a flag for grouped heads
GROUPED: Final = {"enable_gqa": True} if "enable_gqa" in (varlen_attn.__kwdefaults__ or {}) else {}


def on_gpus(case: Case, device: str) -> str | None:
    return "needs a GPU" if device == "cpu" else None


def normed_rotated(x: Inputs) -> tuple[Tensor, Tensor]:
    """Apply the norm and RoPE functions of transformers' Qwen3."""
    q, k = (
        Qwen3RMSNorm.forward(SimpleNamespace(weight=gain, variance_epsilon=EPS), y)
        for y, gain in ((x.q, x.q_gain), (x.k, x.k_gain))
    )
    return apply_rotary_pos_emb(q, k, x.cos, x.sin)


def separate_sdpa(case: Case, x: Inputs) -> Tensor:
    q, k = normed_rotated(x)
    return sdpa(case, x._replace(q=q, k=k), backend=SDPBackend.FLASH_ATTENTION)


def eager(case: Case, x: Inputs) -> Tensor:
    q, k = normed_rotated(x)
    module = SimpleNamespace(num_key_value_groups=case.heads // case.heads_kv, training=False)
    scale = case.head_dim**-0.5
    return eager_attention_forward(module, q, k, x.v, x.mask, scaling=scale, softcap=SOFTCAP)[0].transpose(1, 2)


def dense_mask(case: Case, x: Inputs) -> Tensor:
    place = torch.arange(case.length, device=x.q.device)
    hidden = place[:, None] < place
    if case.window:
        hidden |= place[:, None] - place >= case.window
    if x.ranges is not None:
        hidden |= place < x.ranges[0, :, :1]
    mask = torch.zeros(1, 1, case.length, case.length, dtype=x.q.dtype, device=x.q.device)
    return mask.masked_fill_(hidden, torch.finfo(x.q.dtype).min)


def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return SOFTCAP * torch.tanh(score / SOFTCAP)


def capped_roughly() -> Any:
    """attention-gym's cap, with the GPU's approximate tanh."""
    from attn_gym.mods import generate_tanh_softcap

    return generate_tanh_softcap(SOFTCAP, approx=True)


def flex(case: Case, x: Inputs, *, score_mod: Callable[[], Any]) -> Tensor:
    attend = _flex if x.q.device.type == "cpu" else _compiled(_flex)
    return attend(x.q, x.k, x.v, x.q_gain, x.k_gain, x.cos, x.sin, x.mask, score_mod())


def _flex(
    q: Tensor, k: Tensor, v: Tensor, q_gain: Tensor, k_gain: Tensor, cos: Tensor, sin: Tensor, mask: Any, score_mod: Any
) -> Tensor:
    """Norm and RoPE stand here, so that they are compiled together."""
    q, k = _prologue(q, k, q_gain, k_gain, cos, sin)
    grouped = q.shape[1] != k.shape[1]
    return flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=grouped)


def _prologue(q: Tensor, k: Tensor, q_gain: Tensor, k_gain: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    d = (q.shape[-1],)
    return apply_rotary_pos_emb(F.rms_norm(q, d, q_gain, EPS), F.rms_norm(k, d, k_gain, EPS), cos, sin)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch._dynamo.config
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # a backward pass that is timed by itself is run again
    torch._dynamo.config.recompile_limit = 200  # each shape is compiled by itself
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # uncompiled it would form every logit
    return torch.compile(function, dynamic=False)


def block_mask(case: Case, x: Inputs) -> Any:
    """Return FlexAttention's mask; hidden blocks are skipped."""
    length, window = case.length, case.window or case.length
    place = torch.arange(length, device=x.q.device, dtype=torch.int32)
    sequence = torch.searchsorted(x.boundaries, place, right=True)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = (i >= j) & (i - j < window)
        return near & (sequence[i] == sequence[j]) if case.lengths else near

    return create_block_mask(seen, None, None, length, length, device=x.q.device)


def liger(case: Case, x: Inputs) -> Tensor:
    q, k = liger_normed_rotated(x)
    return sdpa(case, x._replace(q=q, k=k), backend=SDPBackend.FLASH_ATTENTION)


def liger_normed_rotated(x: Inputs) -> tuple[Tensor, Tensor]:
    from liger_kernel.transformers.functional import liger_rms_norm, liger_rope

    q, k = (
        liger_rms_norm(y.transpose(1, 2), gain, EPS).transpose(1, 2) for y, gain in ((x.q, x.q_gain), (x.k, x.k_gain))
    )
    return liger_rope(q, k, x.cos, x.sin)


def needs(package: str, case: Case, device: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return "not installed"
    return on_gpus(case, device)


def our_prologue(case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
    return library.norm_rope(Heads(x.q, x.k, x.v, *norms(x), rotary(x)))


def prologue(function: Callable[[Inputs], tuple[Tensor, Tensor]], case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
    return function(x)


def compiled_prologue(case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
    run = _prologue if x.q.device.type == "cpu" else _compiled(_prologue)
    return run(x.q, x.k, x.q_gain, x.k_gain, x.cos, x.sin)


FLASH = Implementation("SDPA flash, plain", partial(sdpa, backend=SDPBackend.FLASH_ATTENTION))
VARLEN = Implementation("varlen_attn (flash), plain", varlen, missing=on_gpus)
CUDNN = Implementation("SDPA cuDNN, plain", partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION), missing=on_gpus)
CUDNN_REPEATED = replace(CUDNN, name="SDPA cuDNN, plain, K and V repeated before", repeat=True)
OURS = our_variant("ours: norm, RoPE, cap")
ARMS: Final = (  # and the inner loops that they take
    our_variant("ours, gains of 3 (tanh.approx)", gain=LARGE_GAIN),
    our_variant("ours, no cap (no maximum)", softcap=None),
    our_variant("ours, no cap, gains of 3 (online)", softcap=None, gain=LARGE_GAIN),
    our_variant("ours, no norm (tanh.approx, one launch)", normed=False),
    our_variant("ours, neither (online, one launch)", normed=False, softcap=None),
)
DECODING = our_variant("ours: cap", normed=False)
SEPARATE = Implementation("transformers' norm, RoPE; SDPA flash", separate_sdpa, normed=True)
EAGER = Implementation("transformers' eager: norm, RoPE, cap", eager, True, SOFTCAP, mask=dense_mask, copies=1)
FLEX = Implementation(
    "FlexAttention: norm, RoPE, cap",
    partial(flex, score_mod=lambda: capped),
    True,
    SOFTCAP,
    mask=block_mask,
    one_way_on_cpu="FlexAttention has no backward on the CPU",
)
FLEX_ROUGH = Implementation(
    "FlexAttention, tanh.approx: norm, RoPE, cap",
    partial(flex, score_mod=cache(capped_roughly)),
    True,
    SOFTCAP,
    mask=block_mask,
    missing=partial(needs, "attn_gym"),
)
LIGER = Implementation("Liger's norm, RoPE; SDPA flash", liger, normed=True, missing=partial(needs, "liger_kernel"))
RIVALS: Final = (CUDNN_REPEATED, SEPARATE, FLEX, LIGER, EAGER, FLEX_ROUGH)

COPY = Implementation("a copy of q and k", lambda case, x: (x.q.clone(), x.k.clone()), one_way="a copy has none")
PROLOGUE = Implementation("ours: norm, RoPE", our_prologue, normed=True)
PROLOGUE_RIVALS: Final = (
    Implementation("transformers' norm, RoPE", partial(prologue, normed_rotated), normed=True),
    Implementation("F.rms_norm, RoPE, compiled", compiled_prologue, normed=True),
    Implementation(
        "Liger's norm, RoPE", partial(prologue, liger_normed_rotated), True, missing=partial(needs, "liger_kernel")
    ),
)
