"""Encoders of images, and of the text beside them: ViT, CLIP and SigLIP. Nothing is cached."""

from __future__ import annotations

from typing import Any

from hf_qknorm.families.separate import output, output_out_proj, project
from hf_qknorm.families.style import QKV, Style


def length(module: Any) -> int:
    """The number of patches of an image, or of positions of a text."""
    config = module.config
    if not hasattr(config, "image_size"):
        return config.max_position_embeddings
    (height, width), (tall, wide) = _sides(config.image_size), _sides(config.patch_size)
    return (height // tall) * (width // wide)


def _sides(size: Any) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


VIT = Style(project, output, QKV, length=length)
CLIP = Style(
    project,
    output_out_proj,
    QKV,
    dropout=lambda module: module.dropout,
    scale=lambda module: module.scale,
    length=length,
)
