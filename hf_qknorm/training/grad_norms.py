"""How large the gradients of the projections to queries and keys are, head by head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_qknorm.model.attention import patched_layers
from hf_qknorm.training.head_weights import HeadWeights, attention_head_weights

GradientNorms = tuple[Tensor | None, Tensor | None]
QUERIES, KEYS = ("q", "uq", "qr"), ("k", "uk")  # parts that are a head's own: of a latent, those behind it


@torch.no_grad()
def gradient_norms(model: Any) -> dict[str, GradientNorms]:
    """By layer of a patched model, the norms of the gradients of the weights that give queries and keys, as they stand.

    A number a head, `[H]` and `[Hk]`; biases are left out. Where heads can't be told, as with adapters, one number
    `[1]` for all that is trained in the projection. None without a gradient.
    """
    try:
        parts = attention_head_weights(model)
    except ValueError:  # not all projections hold a plain weight
        return {name: _of_projections(layer) for name, layer in patched_layers(model).items()}
    return {
        name: (
            _by_head([p for n, p in found.items() if n in QUERIES]),
            _by_head([found[n] for n in found if n in KEYS]),
        )
        for name, found in parts.items()
    }


def _by_head(parts: Sequence[HeadWeights]) -> Tensor | None:
    squares = []
    for part in parts:
        grad = part.weight.grad
        if grad is None:
            return None
        wide = torch.promote_types(grad.dtype, torch.float32)
        rows = torch.linalg.vector_norm(grad, dim=0 if isinstance(part.projection, Conv1D) else 1, dtype=wide)
        rows = rows.full_tensor() if hasattr(rows, "full_tensor") else rows  # FSDP holds a part of them
        squares.append(rows[part.outputs(rows.device)].square().sum(1))
    return torch.stack(squares).sum(0).sqrt()


def _of_projections(layer: Any) -> GradientNorms:
    names = layer.family.style.weights
    q, k = names[0], names[min(1, len(names) - 1)]
    return _of_projection(layer.get_submodule(q)), _of_projection(layer.get_submodule(k))


def _of_projection(projection: nn.Module) -> Tensor | None:
    grads = [
        torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in projection.parameters() if p.grad is not None
    ]
    return torch.linalg.vector_norm(torch.stack(grads))[None] if grads else None
