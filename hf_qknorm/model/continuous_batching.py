"""The check before transformers' continuous batching, whose worker thread would hide an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_qknorm.families.style import CACHE, FROM_5_24
from hf_qknorm.model.attention import evaluating, patched_layers
from hf_qknorm.model.layer import QKNormAttention


def check_continuous_batching(model: PreTrainedModel) -> None:
    """Raise ValueError if continuous batching can't run a patched model, or would compute another attention.

    A forward of one token shows the heads that each layer caches, and whether the paged cache's arguments, such as
    `read_index`, reach its attention.
    """
    refused: dict[str, str] = {}
    for name, layer in patched_layers(model).items():
        if model.config.is_encoder_decoder:
            refused[name] = "it runs no encoder for the decoder to attend to"
        elif layer.softcap is not None:
            refused[name] = f"it drops the cap on the attention logits (softcap={layer.softcap:g})"
        elif FROM_5_24 and hasattr(model.config.get_text_config(), "cross_attention_layers"):  # Mllama
            refused[name] = "its layers that attend to images read a cache that a paged one is not"
        elif layer.is_unchanged and not _gives_arguments(layer.base_class):
            refused[name] = f"{layer.base_class.__name__}, the model's own, gives a paged cache no arguments"
    if not refused:
        size = _paged_heads(model)
        with _attention_seen(model) as seen:
            model(torch.zeros(1, 1, dtype=torch.long, device=model.device), read_index=None, use_cache=False)
        for name, (key, value, options) in seen.items():
            if options.get("position_bias") is not None:
                refused[name] = "it drops the position bias that this model adds to its logits"
            elif "read_index" not in options:
                refused[name] = "this model does not pass the arguments of the paged cache on to its attention"
            elif {size} != {(x.shape[1], x.shape[3]) for x in (key, value)}:
                got = f"{key.shape[1]} keys of {key.shape[3]} and values of {value.shape[3]}"
                refused[name] = f"the paged cache holds {size[0]} heads of {size[1]}, and this model caches {got}"
    for name, reason in refused.items():
        raise ValueError(
            f"continuous batching can't run {type(model).__name__}: {reason} (layer {name}). Call generate instead, "
            "with a batch of padded prompts"
        )


def _gives_arguments(attention: type[nn.Module]) -> bool:
    """Whether a model's own attention passes its arguments to a paged cache: GPT-NeoX's of 5.24 does not."""
    return not FROM_5_24 or CACHE in signature(attention.forward).parameters


def _paged_heads(model: PreTrainedModel) -> tuple[int, int]:
    """The key heads and their width for which transformers allocates the paged cache."""
    config: Any = model.config.get_text_config()
    queries, keys, width = (
        getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    heads: Any = queries if keys is None else keys
    shards = getattr(model, "tp_size", None) or 1
    return heads // shards, config.hidden_size // queries if width is None else width


@contextmanager
def _attention_seen(model: PreTrainedModel) -> Iterator[dict[str, tuple[Tensor, Tensor, dict[str, Any]]]]:
    """A context in eval mode with eager attention, which gathers the keys, values and options of each layer by name."""
    seen: dict[str, tuple[Tensor, Tensor, dict[str, Any]]] = {}
    layers = patched_layers(model)
    backend, before = model.config._attn_implementation, [layer.observers for layer in layers.values()]

    def observe(layer: QKNormAttention, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> None:
        seen[names[layer]] = k, v, options

    names = {layer: name for name, layer in layers.items()}
    try:
        model.set_attn_implementation("eager")
        for layer in layers.values():
            layer.observers = (observe,)
        with evaluating(model):
            yield seen
    finally:
        for layer, observers in zip(layers.values(), before, strict=True):
            layer.observers = observers
        model.set_attn_implementation(backend)
