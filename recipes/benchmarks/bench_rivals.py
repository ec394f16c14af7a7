"""The implementations of other libraries that are timed beside ours. One that cannot run gets a row with the reason.

They are transformers' functions, torch's FlexAttention with two backends, Liger's norm and RoPE, and FlashAttention 3
and 4.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.nn.functional as F
from bench_cases import EPS, SOFTCAP, Case, Inputs
from bench_implementations import CUDNN_REPEATED, Implementation, on_gpus, prologue, sdpa
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
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


def flex(case: Case, x: Inputs, *, kernel_options: dict[str, Any] | None = None) -> Tensor:
    attend = _flex if x.q.device.type == "cpu" else _compiled(_flex)
    options = {"score_mod": capped, "block_mask": x.mask, "kernel_options": kernel_options}
    return attend(x.q, x.k, x.v, x.q_gain, x.k_gain, x.cos, x.sin, options)


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    cos: Tensor,
    sin: Tensor,
    options: dict[str, Any],
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


def absent(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # its package is absent too
        return True


def needs(module: str, case: Case, device: str) -> str | None:
    return f"absent: there is no module {module}" if absent(module) else on_gpus(case, device)


def missing_flex_flash(case: Case, device: str) -> str | None:
    if absent("torch._inductor.kernel.flex.flex_flash_attention"):
        return f"absent: torch {torch.__version__} has no flash backend of FlexAttention"
    return needs("flash_attn.cute", case, device)  # of flash-attn-4, which the backend calls


def flash_attention(case: Case, x: Inputs, *, module: str) -> Tensor:
    """The function that FlashAttention 3 and 4 share, with heads behind rows."""
    attend = importlib.import_module(module).flash_attn_func
    out = attend(*(y.transpose(1, 2) for y in (x.q, x.k, x.v)), causal=True, softcap=SOFTCAP)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)  # some versions give the log-sum-exp too


def compiled_prologue(case: Case, x: Inputs) -> tuple[Tensor, Tensor]:
    run = _prologue if x.q.device.type == "cpu" else _compiled(_prologue)
    return run(x.q, x.k, x.q_gain, x.k_gain, x.cos, x.sin)


SEPARATE = Implementation("transformers' norm, RoPE; SDPA flash", separate_sdpa, normed=True)
EAGER = Implementation("transformers' eager: norm, RoPE, cap", eager, True, SOFTCAP, mask=dense_mask, copies=1)
FLEX = Implementation(
    "FlexAttention: norm, RoPE, cap",
    flex,
    True,
    SOFTCAP,
    mask=block_mask,
    one_way_on_cpu="FlexAttention has no backward on the CPU",
    compiled=True,
)
FLEX_FLASH = replace(
    FLEX,
    name="FlexAttention, flash backend: norm, RoPE, cap",
    attend=partial(flex, kernel_options={"BACKEND": "FLASH"}),
    missing=missing_flex_flash,
)
LIGER = Implementation("Liger's norm, RoPE; SDPA flash", liger, normed=True, missing=partial(needs, "liger_kernel"))
FLASH_3, FLASH_4 = (
    Implementation(
        f"FlashAttention {version}: cap",
        partial(flash_attention, module=module),
        softcap=SOFTCAP,
        missing=partial(needs, module),
    )
    for version, module in ((3, "flash_attn_interface"), (4, "flash_attn.cute"))
)
FUSED_RIVALS: Final = (CUDNN_REPEATED, FLEX, FLEX_FLASH, FLASH_3, FLASH_4)
SEPARATE_RIVALS: Final = (SEPARATE, LIGER, EAGER)


PROLOGUE_RIVALS: Final = (
    Implementation("transformers' norm, RoPE", partial(prologue, normed_rotated), normed=True),
    Implementation("F.rms_norm, RoPE, compiled", compiled_prologue, normed=True),
    Implementation(
        "Liger's norm, RoPE", partial(prologue, liger_normed_rotated), True, missing=partial(needs, "liger_kernel")
    ),
)
