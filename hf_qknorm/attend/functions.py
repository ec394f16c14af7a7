"""The attention functions registered with transformers.

An attention function takes q `[B, H, T, D]` and k, v `[B, Hk, S, D]` after RoPE and after the cache, and returns
`[B, T, H, D]` and the weights or None. A mask of None means causal, with the layer's window, if the module is causal.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import _active_collector

from hf_qknorm.attend.calls import as_results, is_padded_ranges, is_ranges, make_call, refuse_unsupported, structure
from hf_qknorm.attend.implementations import (
    IMPLEMENTATIONS,
    TRITON,
    Implementation,
    device_type,
    log_once,
    refuse,
    run,
)
from hf_qknorm.attend.masks import structured_mask
from hf_qknorm.attend.servers import SERVER_BACKENDS
from hf_qknorm.files.formatting import shorten
from hf_qknorm.ops import library, reference
from hf_qknorm.ops.checks import check_mask
from hf_qknorm.ops.types import Heads
from hf_qknorm.scheme import Scheme

_NAMED: Final = {x.name: x for x in IMPLEMENTATIONS if x.name is not None}
CAP_BACKENDS: Final = (
    "hf_qknorm",
    *_NAMED,
    "hf_qknorm_eager",
    "eager",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
)
# The attention functions that add a position bias to the logits.
BIAS_BACKENDS: Final = (
    *("eager", "sdpa", "hf_qknorm", "hf_qknorm_eager"),
    *(name for name, implementation in _NAMED.items() if implementation.takes_masks),
)


def cap_backend(config: Any) -> str:
    """The default backend of a cap.

    transformers takes "eager" alone for a config with attention weights.
    """
    return "eager" if config.output_attentions else "hf_qknorm"


def check_cap_backend(name: str, softcap: float) -> None:
    """Raise ValueError unless the backend `name` is known and can cap attention logits."""
    if name in CAP_BACKENDS or name in SERVER_BACKENDS:
        return
    able = f"Backends that can cap attention logits (softcap={softcap:g}): {', '.join(CAP_BACKENDS)}"
    known = {*CAP_BACKENDS, *SERVER_BACKENDS, *ALL_ATTENTION_FUNCTIONS.valid_keys()}
    if name not in known and "/" not in name:  # a name with a slash is a kernel's repository on the Hub
        near = get_close_matches(name, CAP_BACKENDS, n=1)
        guess = f": did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"attn_implementation={shorten(name)} is unknown{guess} {able}")
    raise ValueError(
        f"attn_implementation={shorten(name)} can't cap attention logits (softcap={softcap:g}) and would drop the cap. "
        f"{able}"
    )


def check_bias_backend(name: str) -> None:
    """Raise ValueError unless the backend `name` adds a model's position bias to the logits."""
    if name not in BIAS_BACKENDS:
        raise ValueError(
            f"attn_implementation={shorten(name)} would drop the position bias that this model adds to its logits. "
            f"Backends that add it: {', '.join(BIAS_BACKENDS)}"
        )


def attention_function(
    module: nn.Module, scheme: Scheme, eager: Callable[..., Any]
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function of the module's config; `eager` is the model's eager function.

    The models' eager functions have no cap: a scheme with one replaces them.
    """
    name: str = module.config._attn_implementation  # type: ignore[union-attr, assignment]
    if scheme.softcap is not None:
        check_cap_backend(name, scheme.softcap)
        eager = eager_attention
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


def weights_wanted(options: dict[str, Any]) -> bool:
    """Whether attention weights are asked for, by this call's options or by the model's.

    transformers keeps the model's options in a context variable. A trace can read its global part alone.
    """
    gathered = _active_collector.global_var if torch.compiler.is_compiling() else _active_collector.get()
    return bool(options.get("output_attentions")) or "attentions" in (gathered or ())


def takes_raw_heads(module: nn.Module, heads: Heads, mask: Tensor | None, options: dict[str, Any]) -> bool:
    """Whether the Triton kernels norm, rotate and attend for a layer: by its backend, the heads, and the mask's form.

    "hf_qknorm" asks for them on CUDA, "hf_qknorm_triton" in Triton's interpreter too.
    """
    name: str = module.config._attn_implementation  # type: ignore[union-attr, assignment]
    if name != TRITON.name and (name != "hf_qknorm" or device_type(heads.q) != "cuda"):
        return False
    ranges = mask is None or is_ranges(mask) or is_padded_ranges(mask)
    return ranges and not weights_wanted(options) and library.why_not_fused(*heads[:3]) is None


def best_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The first of `IMPLEMENTATIONS` that takes the call; `attn_implementation="hf_qknorm"`.

    All need memory linear in the length, and together support cap, window, sinks and dropout. For
    `output_attentions=True`, and for the gradient of a position bias or dropout beside one, it is the eager function,
    which holds every logit in memory.
    """
    bias = kwargs.get("position_bias")
    # Reentrant checkpointing first runs without gradients: with dropout, both runs must draw the same mask.
    biased = bias is not None and (kwargs.get("dropout") or (bias.requires_grad and torch.is_grad_enabled()))
    if biased or weights_wanted(kwargs):
        log_once("forms every logit in memory, for output_attentions=True, or a position bias with gradient or dropout")
        return eager_attention(module, query, key, value, attention_mask, **kwargs)
    return as_results(run(make_call(module, Heads(query, key, value), attention_mask, **kwargs)), value)


def _named(implementation: Implementation) -> Callable[..., tuple[Tensor, None]]:
    """The attention function that takes one implementation, or raises a ValueError with the reason."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if weights_wanted(kwargs):
            raise ValueError(
                f"attn_implementation={implementation.name!r} never forms the attention weights that "
                'output_attentions=True asks for: call model.set_attn_implementation("hf_qknorm_eager") before, or '
                '"hf_qknorm", which forms them when asked'
            )
        call = make_call(module, Heads(query, key, value), attention_mask, **kwargs)
        reason = implementation.why_not(*call)
        if reason is not None and kwargs.get("position_bias") is not None:
            reason = "the model adds a position bias to its logits"
        refuse(reason, implementation)
        return as_results(implementation.run(*call), value)

    return attention


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """`reference.attention`, with every logit in memory and weights; `attn_implementation="hf_qknorm_eager"`."""
    refuse_unsupported(kwargs)
    seen = structure(module, query, key, value, attention_mask, kwargs)
    key = seen.key
    check_mask(seen.mask, (*query.shape[:3], key.shape[2]))
    ones = query.new_ones((*query.shape[:3], key.shape[2])) if dropout else None
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
        dropout_mask=None if ones is None else nn.functional.dropout(ones, dropout),  # torch checks the rate
    )
    weights = result.weights.to(value.dtype)
    if seen.order is not None:
        weights = torch.zeros_like(weights).scatter(-1, seen.order[:, None, None].expand_as(weights), weights)
    return result.out.transpose(1, 2).contiguous(), weights


REGISTERED: Final[dict[str, Callable[..., Any]]] = {
    "hf_qknorm": best_attention,
    **{name: _named(implementation) for name, implementation in _NAMED.items()},
    "hf_qknorm_eager": eager_attention,
}


def register() -> None:
    """Register each attention function with the mask function, without which causality is lost."""
    for name, function in REGISTERED.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, structured_mask)


register()
