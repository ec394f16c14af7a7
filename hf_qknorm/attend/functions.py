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

from hf_qknorm.attend import servers
from hf_qknorm.attend.calls import as_results, make_call
from hf_qknorm.attend.implementations import IMPLEMENTATIONS, Implementation, choose, log_once
from hf_qknorm.attend.masks import structured_mask
from hf_qknorm.attend.servers import SERVER_BACKENDS
from hf_qknorm.files.formatting import shorten
from hf_qknorm.ops import reference
from hf_qknorm.ops.traces import is_exporting
from hf_qknorm.ops.types import Heads

_NAMED: Final = {x.name: x for x in IMPLEMENTATIONS}
OWN_BACKENDS: Final = ("hf_qknorm", *_NAMED, "hf_qknorm_eager")
CAP_BACKENDS: Final = (
    *OWN_BACKENDS,
    "eager",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
)


def cap_backend(asked: str | None, softcap: float, config: Any, *, own_forward: bool) -> str:
    """The backend of a capped model: `asked`, if it can cap, or the default for None.

    A model's own forward calls its own eager function, which has no cap: "eager" is "hf_qknorm_eager" there. For a
    config with attention weights transformers takes "eager" alone. Raises ValueError for a backend without a cap.
    """
    name = asked or ("eager" if config.output_attentions else "hf_qknorm")
    if own_forward and config.output_attentions:
        raise ValueError(
            "config.output_attentions=True needs this model's own eager attention, which has no cap: set it to False, "
            "and call the model with output_attentions=True"
        )
    name = "hf_qknorm_eager" if own_forward and name == "eager" else name
    check_cap_backend(name, softcap, own_forward=own_forward)
    return name


def check_cap_backend(name: str, softcap: float, *, own_forward: bool = False) -> None:
    """Raise ValueError unless the backend `name` is known and can cap attention logits.

    A model's own forward passes no cap on, so that the function must read it from the module.
    """
    backends = OWN_BACKENDS if own_forward else CAP_BACKENDS
    if name in backends or name in SERVER_BACKENDS:
        return
    able = f"Backends that can cap attention logits (softcap={softcap:g}) in this model: {', '.join(backends)}"
    known = {*CAP_BACKENDS, *SERVER_BACKENDS, *ALL_ATTENTION_FUNCTIONS.valid_keys()}
    if name not in known and "/" not in name:  # a name with a slash is a kernel's repository on the Hub
        near = get_close_matches(name, backends, n=1)
        guess = f": did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"attn_implementation={shorten(name)} is unknown{guess} {able}")
    raise ValueError(
        f"attn_implementation={shorten(name)} can't cap attention logits (softcap={softcap:g}) and would drop the cap. "
        f"{able}"
    )


def check_mask_function(name: str) -> None:
    """Raise ValueError for a registered backend without a mask function: transformers would drop masks."""
    if name in ALL_ATTENTION_FUNCTIONS.valid_keys() and name not in AttentionMaskInterface().valid_keys():
        raise ValueError(
            f"attn_implementation={shorten(name)} has no mask function, without which later tokens are seen: "
            "AttentionMaskInterface.register(name, function)"
        )


def attend(
    layer: Any, name: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Attention of a patched layer's heads, after the cache, by the attention function of that name.

    The models' own eager functions have no cap.
    """
    capped = layer.scheme.softcap is not None
    if capped:
        check_cap_backend(name, layer.scheme.softcap)
    if name in SERVER_BACKENDS:
        q = servers.for_server(layer, q, options)
    eager = eager_attention if capped else layer.family.style.eager(layer)
    function: Any = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    if function.__module__ != __name__:  # the functions of this module show the heads themselves
        show(layer, q, k, v, mask, options)
    found: tuple[Tensor, Tensor | None] = function(layer, q, k, v, mask, **options)
    return found


def show(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> None:
    """Show the heads `[B, H or Hk, T or S, D]` that attention gets to the layer's observers."""
    for observer in getattr(module, "observers", ()):
        observer(module, q, k, v, mask, options)


def weights_wanted(options: dict[str, Any]) -> bool:
    """Whether attention weights are asked for, by this call's options or by the model's.

    transformers keeps the model's options in a context variable. A trace can read its global part alone.
    """
    gathered = _active_collector.global_var if torch.compiler.is_compiling() else _active_collector.get()
    return bool(options.get("output_attentions")) or "attentions" in (gathered or ())


def best_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The first of `IMPLEMENTATIONS` that takes the call; `attn_implementation="hf_qknorm"`.

    All need memory linear in the length, and together support cap, window, sinks and dropout. For
    `output_attentions=True`, and in an exported graph, which has operators of torch alone, it is the eager function,
    which holds every logit in memory.
    """
    if weights_wanted(kwargs) or is_exporting():
        log_once("forms every logit in memory, for output_attentions=True")
        return eager_attention(module, query, key, value, attention_mask, **kwargs)
    show(module, query, key, value, attention_mask, kwargs)
    call = make_call(module, Heads(query, key, value), attention_mask, **kwargs)
    return as_results(choose(call).implementation.run(call), value)


def _named(implementation: Implementation) -> Callable[..., tuple[Tensor, None]]:
    """The attention function that takes one implementation, or raises a ValueError with the reason."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if weights_wanted(kwargs):
            raise ValueError(
                f'attn_implementation="{implementation.name}" never forms the weights that output_attentions=True asks '
                'for: call model.set_attn_implementation("hf_qknorm_eager")'
            )
        show(module, query, key, value, attention_mask, kwargs)
        call = make_call(module, Heads(query, key, value), attention_mask, **kwargs)
        implementation.prepare()
        reason = implementation.why_not(call)
        if reason is not None and kwargs.get("position_bias") is not None:
            reason = "the model adds a position bias to its logits"
        if reason is not None:
            raise ValueError(
                f'attn_implementation="{implementation.name}" can\'t serve this call: {reason}. Call '
                'model.set_attn_implementation("hf_qknorm"), which takes the kernels only where they serve'
            )
        return as_results(implementation.run(call), value)

    return attention


def eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """`reference.attention`, with every logit in memory and weights; `attn_implementation="hf_qknorm_eager"`."""
    show(module, query, key, value, attention_mask, kwargs)
    heads, visible, options = make_call(module, Heads(query, key, value), attention_mask, **kwargs)
    kept = None
    if options.dropout:
        kept = nn.functional.dropout(heads.q.new_ones((*heads.q.shape[:3], heads.k.shape[2])), options.dropout)
    if getattr(module, "reorder_and_upcast_attn", False):  # GPT-2's switch: logits in fp32
        heads = heads._replace(q=heads.q.float(), k=heads.k.float())
    result = reference.attend(heads, visible, options, kept)
    out = result.out[..., : value.shape[-1]].transpose(1, 2)
    return out.contiguous(), result.weights.to(value.dtype)


REGISTERED: Final[dict[str, Callable[..., Any]]] = {
    "hf_qknorm": best_attention,
    **{name: _named(implementation) for name, implementation in _NAMED.items()},
    "hf_qknorm_eager": eager_attention,
}


for _name, _function in REGISTERED.items():
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, structured_mask)  # without one, causality is lost
