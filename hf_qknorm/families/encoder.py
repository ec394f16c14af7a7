"""Encoders of text and images: BERT and its relatives, which may be decoders too, ViT, CLIP and SigLIP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_qknorm.families.separate import output_out_proj
from hf_qknorm.families.style import Projected, Style

WEIGHTS = ("query", "key", "value")


def project_bert(module: Any, hidden_states: Tensor) -> Projected:
    shape = (*hidden_states.shape[:-1], -1, module.attention_head_size)
    return tuple(getattr(module, name)(hidden_states).view(shape) for name in WEIGHTS)


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
VIT = Style(length=length)
CLIP = replace(VIT, output=output_out_proj, dropout=lambda module: module.dropout, scale=lambda module: module.scale)
