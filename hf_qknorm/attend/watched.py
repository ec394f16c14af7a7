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

# For transformers' functions, those that show the heads before. By name alone, which copies of a config hold too.
SHOWING: Final = {name: f"hf_qknorm_watched_{name}" for name in ("sdpa", "eager")}


def watch(layer: Any) -> Callable[[], None]:
    """Let a patched layer, and others with its config, show their heads; return the call that undoes it.

    They are computed as before by "sdpa" and "eager", and else by "hf_qknorm".
    """
    config, backend = layer.config, layer.config._attn_implementation
    if not layer.runs_own_forward or backend in (*OWN_BACKENDS, *SHOWING.values()):
        return _nothing
    config._attn_implementation_internal = SHOWING.get(backend, "hf_qknorm")
    return partial(setattr, config, "_attn_implementation_internal", backend)


def _nothing() -> None:
    """Undo nothing; no lambda, which pickles can't hold."""


def _showing(name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """transformers' attention function of that name, after the heads are shown to the observers."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        show(module, query, key, value, attention_mask, options)
        function: Any = ALL_ATTENTION_FUNCTIONS.get_interface(name, module.modelling.eager_attention_forward)
        found: tuple[Tensor, Tensor | None] = function(module, query, key, value, attention_mask, **options)
        return found

    return attention


for _name, _shown in SHOWING.items():
    AttentionInterface.register(_shown, _showing(_name))
    AttentionMaskInterface.register(_shown, ALL_MASK_ATTENTION_FUNCTIONS[_name])
