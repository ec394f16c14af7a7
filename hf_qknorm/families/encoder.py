"""Encoders of text and images: BERT and its relatives, which may be decoders too, GIT, ViT, CLIP and SigLIP."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from hf_qknorm.families.separate import forward_by_role, output_out_proj
from hf_qknorm.families.style import Projected, Rotated, Style

WEIGHTS = ("query", "key", "value")


def project_bert(module: Any, hidden_states: Tensor) -> Projected:
    shape = (*hidden_states.shape[:-1], -1, module.attention_head_size)
    return tuple(getattr(module, name)(hidden_states).view(shape) for name in WEIGHTS)


def attend_rembert(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """RemBERT and others: the module's own computation, `[B, T, H, D]` and the weights."""
    logits = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(module.attention_head_size)
    logits = logits if mask is None else logits + mask
    weights = module.dropout(nn.functional.softmax(logits, dim=-1))
    return torch.matmul(weights, v).transpose(1, 2), weights


def forward_git(
    shared: Callable[..., Any],
    module: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    """GIT: its layers pass the cache as the third argument."""
    return shared(hidden_states, attention_mask, past_key_values=past_key_values, **kwargs)


def unsupported_bigbird(config: Any) -> str | None:
    """Return the reason why a model with this config can't be patched, or None."""
    if config.attention_type != "original_full":
        return f'attention_type="{config.attention_type}": blocks of keys are selected for each query'
    return unmasked_decoder(config, "big_bird")


def unmasked_decoder(config: Any, model_type: str = "roformer") -> str | None:
    """The reason against a decoder whose tokens attend to later ones in older versions of transformers, or None."""
    modelling = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    if not config.is_decoder or hasattr(modelling, "create_causal_mask"):
        return None
    return f"is_decoder=True: transformers {transformers.__version__} does not mask its decoder. Update transformers"


def forward_roformer(
    shared: Callable[..., Any], module: Any, *args: Any, sinusoidal_pos: Tensor | None = None, **kwargs: Any
) -> Any:
    return forward_by_role(shared, module, *args, position_embeddings=sinusoidal_pos, **kwargs)


def rotate_roformer(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, **arguments: Any) -> Rotated:
    """RoFormer: values may be rotated too."""
    if positions is None:
        return q, k, v
    rotated = (q, k, v) if module.rotary_value else (q, k)
    rotated = module.apply_rotary_position_embeddings(positions, *rotated)
    return rotated if module.rotary_value else (*rotated, v)


def length(module: Any) -> int:
    """The number of patches of an image, or of positions of a text."""
    config = module.config
    if not hasattr(config, "image_size"):
        return config.max_position_embeddings
    (height, width), (tall, wide) = _sides(config.image_size), _sides(config.patch_size)
    return (height // tall) * (width // wide)


def _sides(size: Any) -> Any:
    return (size, size) if isinstance(size, int) else size


BERT = Style(
    project_bert,
    lambda module, attended: attended,  # another module projects the output
    WEIGHTS,
    dropout=lambda module: module.dropout.p,
    heads=lambda module: (module.num_attention_heads, module.num_attention_heads, module.attention_head_size),
)
# The relatives of BERT whose modules compute attention themselves
INLINE = replace(
    BERT,
    forward=forward_by_role,
    inline=True,
    eager=lambda module: attend_rembert,
    scale=lambda module: module.attention_head_size**-0.5,
)
GIT = replace(INLINE, forward=forward_git)  # causal but for the patches of images, which its masks contain
ROFORMER = replace(
    INLINE,
    forward=forward_roformer,
    rotate=rotate_roformer,
    length=lambda module: module.config.max_position_embeddings,
)
VIT = Style(length=length)
CLIP = replace(VIT, output=output_out_proj, dropout=lambda module: module.dropout, scale=lambda module: module.scale)
