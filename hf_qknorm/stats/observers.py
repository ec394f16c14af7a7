"""The patched layers of a model, and the observers of their logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_qknorm.model.attention import QKNormAttention, patched_layers


class _Observers(list[Any]):
    """Several observers of a layer, called in order."""

    def __call__(self, *arguments: Any) -> None:
        for observer in self:
            observer(*arguments)


def require_patched(model: Any) -> dict[str, QKNormAttention]:
    """The patched layers of `model`, by name. Raises ValueError for a model without any."""
    layers = patched_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} is not patched: call patch_model(model, scheme) first. "
            'The scheme "none" changes nothing'
        )
    return layers


def observers(layer: QKNormAttention) -> Sequence[Any]:
    """The layer's observers, oldest first."""
    found: Any = layer.observer
    return found if isinstance(found, _Observers) else [] if found is None else [found]


def add_observer(layer: QKNormAttention, observer: Any) -> None:
    """Add `observer` to the layer's observers, unless it is there already."""
    if observer not in observers(layer):
        _set_observers(layer, [*observers(layer), observer])


def remove_observer(layer: QKNormAttention, observer: Any) -> None:
    """Remove `observer` from the layer's observers."""
    _set_observers(layer, [other for other in observers(layer) if other is not observer])


def _set_observers(layer: QKNormAttention, found: list[Any]) -> None:
    if found:
        layer.observer = found[0] if len(found) == 1 else _Observers(found)
    elif layer.observer is not None:
        del layer.observer
