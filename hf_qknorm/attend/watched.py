"""Observers of layers that run the model's own forward, where the attention function is transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_qknorm.attend.functions import OWN_BACKENDS, show

NAME: Final = "hf_qknorm_watched"
_WATCHED: dict[int, str] = {}  # by id of a config, the function that it names


def watch(layer: Any) -> Callable[[], None]:
    """Let a patched layer, and others with its config, show their heads; return the call that undoes it.

    They are computed as before by "sdpa" and "eager", and else by "hf_qknorm".
    """
    config, backend = layer.config, layer.config._attn_implementation
    if not layer.runs_own_forward or backend in (*OWN_BACKENDS, NAME):
        return _nothing
    config._attn_implementation_internal = NAME if backend in ("sdpa", "eager") else "hf_qknorm"
    _WATCHED[id(config)] = backend
    return partial(_unwatch, config)


def _unwatch(config: Any) -> None:
    config._attn_implementation_internal = _WATCHED.pop(id(config))


def _nothing() -> None:
    """Undo nothing; no lambda, which pickles can't hold."""


def watched_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention by the function that the layer's config named, after its heads are shown to the observers."""
    show(module, query, key, value, attention_mask, options)
    name, eager = _WATCHED[id(module.config)], module.modelling.eager_attention_forward
    function: Any = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    found: tuple[Tensor, Tensor | None] = function(module, query, key, value, attention_mask, **options)
    return found


def watched_mask(*args: Any, config: Any, **options: Any) -> Any:
    """The mask of the function that the config named."""
    return ALL_MASK_ATTENTION_FUNCTIONS[_WATCHED[id(config)]](*args, config=config, **options)


AttentionInterface.register(NAME, watched_attention)
AttentionMaskInterface.register(NAME, watched_mask)
