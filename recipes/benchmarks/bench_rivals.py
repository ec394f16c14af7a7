"""The implementations that torch and transformers have: they are timed beside ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.nn.functional as F
from bench_cases import EPS, SOFTCAP, Case, Inputs
from bench_implementations import CUDNN_REPEATED, Implementation, prologue, sdpa
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb


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


def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return SOFTCAP * torch.tanh(score / SOFTCAP)


def flex(case: Case, x: Inputs) -> Tensor:
    attend = _flex if x.q.device.type == "cpu" else _compiled(_flex)
    options = {"score_mod": capped, "block_mask": x.mask}
    return attend(x.q, x.k, x.v, x.q_gain, x.k_gain, x.cos, x.sin, options)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, q_gain: Tensor, k_gain: Tensor, cos: Tensor, sin: Tensor, options: dict[str, Any]
) -> Tensor:
    """Norm and RoPE stand here, so that they are compiled together."""
    q, k = _prologue(q, k, q_gain, k_gain, cos, sin)
    return flex_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options)


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

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < window)

    return create_block_mask(seen, None, None, length, length, device=x.q.device)


def compiled_prologue(case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
    run = _prologue if x.q.device.type == "cpu" else _compiled(_prologue)
    return run(x.q, x.k, x.q_gain, x.k_gain, x.cos, x.sin)


SEPARATE = Implementation("transformers' norm, RoPE; SDPA flash", separate_sdpa, normed=True)
FLEX = Implementation(
    "FlexAttention: norm, RoPE, cap",
    flex,
    True,
    SOFTCAP,
    mask=block_mask,
    one_way_on_cpu="FlexAttention has no backward on the CPU",
    compiled=True,
)
FUSED_RIVALS: Final = (CUDNN_REPEATED, FLEX)
PROLOGUE_RIVALS: Final = (
    Implementation("transformers' norm, RoPE", partial(prologue, normed_rotated), normed=True),
    Implementation("F.rms_norm, RoPE, compiled", compiled_prologue, normed=True),
)
