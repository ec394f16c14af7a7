"""The norms of the gradients of the projections to queries and keys, head by head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_qknorm.model.attention import patched_layers
from hf_qknorm.training.head_weights import HeadWeights, attention_head_weights

GradientNorms = tuple[Tensor | None, Tensor | None]
QUERIES, KEYS = ("q", "uq", "qr"), ("k", "uk")  # parts that belong to a head; of a latent, those behind it


@torch.no_grad()
def gradient_norms(model: Any) -> dict[str, GradientNorms]:
    """By layer of a patched model, the norms of the present gradients of the weights of queries and of keys.

    One number per head, `[H]` and `[Hk]`, without biases. Where heads are not separate, as with adapters, one number
    `[1]` for all that is trained in the projection. None without a gradient.
    """
    try:
        layers = attention_head_weights(model)
    except ValueError:  # not all projections hold a plain weight
        return {name: _of_projections(layer) for name, layer in patched_layers(model).items()}
    return {
        name: (
            _by_head([p for n, p in parts.items() if n in QUERIES]),
            _by_head([parts[n] for n in KEYS if n in parts]),
        )
        for name, parts in layers.items()
    }


def _by_head(parts: Sequence[HeadWeights]) -> Tensor | None:
    grads = [part.weight.grad for part in parts]
    norms = [part.norms(grad) for part, grad in zip(parts, grads, strict=True) if grad is not None]
    return torch.stack(norms).square().sum(0).sqrt() if len(norms) == len(parts) else None


def _of_projections(layer: Any) -> GradientNorms:
    names = layer.family.style.weights
    q, k = names[0], names[min(1, len(names) - 1)]
    return _of_projection(layer.get_submodule(q)), _of_projection(layer.get_submodule(k))


def _of_projection(projection: nn.Module) -> Tensor | None:
    grads = [
        torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in projection.parameters() if p.grad is not None
    ]
    return torch.linalg.vector_norm(torch.stack(grads))[None] if grads else None
