"""The patched layers of a model, and the observers of their logits."""

from __future__ import annotations

from typing import Any

from hf_qknorm.model.attention import QKNormAttention, patched_layers


def require_patched(model: Any) -> dict[str, QKNormAttention]:
    """The patched layers of `model`, by name. Raises ValueError for a model without any."""
    layers = patched_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} is not patched: call patch_model(model, scheme) first. "
            'The scheme "none" changes nothing'
        )
    return layers


def add_observer(layer: QKNormAttention, observer: Any) -> None:
    """Add `observer` to the layer's observers, unless it is there already."""
    if observer not in layer.observers:
        layer.observers += (observer,)


def remove_observer(layer: QKNormAttention, observer: Any) -> None:
    """Remove `observer` from the layer's observers."""
    layer.observers = tuple(other for other in layer.observers if other is not observer)
    if not layer.observers:
        del layer.observers
