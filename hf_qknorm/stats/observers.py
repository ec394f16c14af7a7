"""Several observers of one layer's logits: each holds, as `before`, the one that it passes on to what it sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_qknorm.model.attention import QKNormAttention


def observers(layer: QKNormAttention) -> Iterator[Any]:
    """Who observes the layer, the latest first."""
    observer: Any = layer.observer
    while observer is not None:
        yield observer
        observer = getattr(observer, "before", None)


def add_observer(layer: QKNormAttention, observer: Any) -> None:
    """Let `observer` see the layer's logits, after those who do so already; once only."""
    if all(other is not observer for other in observers(layer)):
        observer.before, layer.observer = layer.observer, observer


def remove_observer(layer: QKNormAttention, observer: Any) -> None:
    """Take `observer` off the layer, whoever has joined since."""
    before = observer.before
    for other in observers(layer):
        if getattr(other, "before", None) is observer:
            other.before = before
    if layer.observer is observer:
        del layer.observer
        if before is not None:
            layer.observer = before
