"""The attention functions registered with transformers: this file and masks.py alone know that contract.

An attention function gets q `[B, H, T, D]` and k, v `[B, Hk, S, D]` after RoPE and after the cache, and returns
`[B, T, H, D]` and the weights or None. A mask of None means causal if the module is and there is more than one query.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import _active_collector

from hf_qknorm.backends.masks import is_padded_ranges, is_ranges, structure, structured_mask
from hf_qknorm.ops import library, reference
from hf_qknorm.ops.types import Norm, Rotary

logger = logging.getLogger(__name__)
_told: set[str] = set()

CAP_BACKENDS: Final = (
    "hf_qknorm",
    "hf_qknorm_triton",
    "hf_qknorm_tiled",
    "hf_qknorm_eager",
    "eager",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
)
# Servers that swap the attention function and read the cap from config.attn_logit_softcapping themselves.
SERVER_BACKENDS: Final = ("vllm", "sglang")


def cap_backend(config: Any) -> str:
    """The backend of a capped model by default; transformers saves a wish for attention weights with "eager" alone."""
    return "eager" if config.output_attentions else "hf_qknorm"


def check_cap_backend(name: str, softcap: float) -> None:
    """Raise ValueError unless the backend `name` is known, and can cap attention logits."""
    if name in CAP_BACKENDS or name in SERVER_BACKENDS:
        return
    able = f"Backends that can cap attention logits (softcap={softcap:g}): {', '.join(CAP_BACKENDS)}"
    known = {*CAP_BACKENDS, *SERVER_BACKENDS, *ALL_ATTENTION_FUNCTIONS.valid_keys()}
    if name not in known and "/" not in name:  # a slash: a kernel's repository on the Hub
        near = get_close_matches(name, CAP_BACKENDS, n=1)
        meant = f": did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"attn_implementation={name!r} is unknown{meant} {able}")
    raise ValueError(
        f"attn_implementation={name!r} can't cap attention logits (softcap={softcap:g}) and would drop the cap. {able}"
    )


def attention_function(
    module: nn.Module, softcap: float | None, eager: Callable[..., Any]
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function that the module's config asks for. `softcap` is the scheme's own; `eager` the model's function.

    The models' own eager functions know no cap: a capped scheme replaces them.
    """
    name: str = module.config._attn_implementation  # type: ignore[union-attr, assignment]
    if softcap is not None:
        check_cap_backend(name, softcap)
        eager = eager_attention
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


def weights_wanted(options: dict[str, Any]) -> bool:
    """Whether the caller asks for attention weights: in the options of this call, or of the model's, not all passed on.

    transformers keeps the model's in a context variable, of which a trace can read the global part alone.
    """
    gathered = _active_collector.global_var if torch.compiler.is_compiling() else _active_collector.get()
    return bool(options.get("output_attentions")) or "attentions" in (gathered or ())


def kernels_take(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> bool:
    """Whether the module's backend is one that norms, rotates and attends in one kernel, and that takes this call.

    Heads `[B, H or Hk, T, D]`, raw. "hf_qknorm" does so on CUDA, "hf_qknorm_triton" in Triton's interpreter too.
    """
    name: str = module.config._attn_implementation  # type: ignore[union-attr, assignment]
    if name not in ("hf_qknorm", "hf_qknorm_triton") or (name == "hf_qknorm" and not query.is_cuda):
        return False
    return not weights_wanted(options) and _why_not_kernels(query, key, value, mask) is None


def _why_not_kernels(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str | None:
    if mask is not None and not is_ranges(mask) and not is_padded_ranges(mask):
        return f"the mask {list(mask.shape)} is an arbitrary one, and not a range of keys for each query"
    return library.why_not_fused(query, key, value)


def best_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The fused kernels on CUDA for whatever they take, else the tiled one; `attn_implementation="hf_qknorm"`.

    Both need memory linear in length, and know cap, window, sinks and dropout. Neither forms the attention weights:
    with `output_attentions=True` the oracle does, with every logit in memory.
    """
    if weights_wanted(kwargs):
        _tell("forms every logit in memory, for output_attentions=True")
        return eager_attention(module, query, key, value, attention_mask, **kwargs)
    reason = _why_not_kernels(query, key, value, attention_mask) if query.is_cuda else "the tensors are not on CUDA"
    if query.is_cuda:
        _tell("runs its Triton kernels" if reason is None else f"runs tiled in PyTorch: {reason}")
    attend = library.fused_attention if reason is None else library.attention
    return _attend(attend, module, query, key, value, attention_mask, **kwargs)


def triton_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The fused kernels, or a ValueError that says why not; `attn_implementation="hf_qknorm_triton"`."""
    reason = _why_not_kernels(query, key, value, attention_mask)
    if reason is not None:
        raise ValueError(
            f'attn_implementation="hf_qknorm_triton" can\'t serve this call: {reason}. Call '
            'model.set_attn_implementation("hf_qknorm"), which takes the kernels only where they serve'
        )
    return _attend(library.fused_attention, module, query, key, value, attention_mask, **kwargs)


def tiled_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """A block of queries at a time, in PyTorch, on any device; `attn_implementation="hf_qknorm_tiled"`."""
    return _attend(library.attention, module, query, key, value, attention_mask, **kwargs)


def fused_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    q_norm: Norm,
    k_norm: Norm,
    rotary: Rotary | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over raw heads: what `kernels_take` promised, norm and RoPE included, with a backward of its own.

    Values may be narrower than queries and keys, but not wider: a norm would see the padding.
    """
    if query.is_cuda:
        _tell("runs its Triton kernels, norm and RoPE included")
    attend = partial(library.fused_attention, q_norm=q_norm, k_norm=k_norm, rotary=rotary)
    return _attend(attend, module, query, key, value, attention_mask, **kwargs)


def _attend(
    attend: Callable[..., Tensor],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if weights_wanted(kwargs):
        name = module.config._attn_implementation  # type: ignore[union-attr]
        raise ValueError(
            f"attn_implementation={name!r} never forms the attention weights that output_attentions=True asks for: "
            'call model.set_attn_implementation("hf_qknorm_eager") before, or "hf_qknorm", which forms them when asked'
        )
    _refuse_unsupported(kwargs)
    boundaries = kwargs.get("cu_seq_lens_q")
    seen = structure(module, query, key, value, attention_mask, sliding_window, is_causal, boundaries)
    masks = {"ranges": seen.ranges} if seen.mask is None else {"ranges": seen.ranges, "mask": seen.mask}
    out = attend(
        *_even(query, seen.key, seen.value),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        causal=seen.causal,
        window=seen.window,
        sinks=s_aux,
        dropout=dropout,
        **masks,
    )
    return out[..., : value.shape[-1]].transpose(1, 2).contiguous(), None


def _even(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """The three with one width of heads: zeros behind the narrower ones change neither logits nor what is seen."""
    widths = [x.shape[-1] for x in (query, key, value)]
    return tuple(
        x if width == max(widths) else nn.functional.pad(x, (0, max(widths) - width))
        for x, width in zip((query, key, value), widths, strict=True)
    )


def _tell(what: str) -> None:
    """Say once, at info level, what runs; a traced graph is silent."""
    if not torch.compiler.is_compiling() and what not in _told:
        _told.add(what)
        logger.info("hf_qknorm attention %s", what)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The oracle as a backend: every logit in memory, weights returned; `attn_implementation="hf_qknorm_eager"`."""
    _refuse_unsupported(kwargs)
    boundaries = kwargs.get("cu_seq_lens_q")
    seen = structure(module, query, key, value, attention_mask, sliding_window, is_causal, boundaries)
    key = seen.key
    dropout_mask = None
    if dropout != 0:  # torch refuses what is no rate
        kept = query.new_ones((*query.shape[:3], key.shape[2]))
        dropout_mask = nn.functional.dropout(kept, dropout)
    if getattr(module, "reorder_and_upcast_attn", False):  # GPT-2's switch: logits in fp32
        query, key = query.float(), key.float()
    result = reference.attention(
        query,
        key,
        seen.value,
        scale=scaling,
        softcap=softcap,
        causal=seen.causal,
        window=seen.window,
        mask=seen.mask,
        ranges=seen.ranges,
        sinks=s_aux,
        dropout_mask=dropout_mask,
    )
    weights = result.weights.to(value.dtype)
    if seen.order is not None:
        weights = torch.zeros_like(weights).scatter(-1, seen.order[:, None, None].expand_as(weights), weights)
    return result.out.transpose(1, 2).contiguous(), weights


def _refuse_unsupported(arguments: dict[str, Any]) -> None:
    for name in ("position_bias", "cache"):
        if arguments.get(name) is not None:
            raise ValueError(f"hf_qknorm attention does not support the argument {name!r}")


REGISTERED: Final[dict[str, Callable[..., Any]]] = {
    "hf_qknorm": best_attention,
    "hf_qknorm_triton": triton_attention,
    "hf_qknorm_tiled": tiled_attention,
    "hf_qknorm_eager": eager_attention,
}


def register() -> None:
    """Register each attention function together with its mask function: without one, causality is lost."""
    for name, function in REGISTERED.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, structured_mask)
