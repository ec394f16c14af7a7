"""Which layers of a model attend through a sliding window: those for which transformers builds the mask with one.

The window's length is `config.sliding_window`, as in these masks.
"""

from __future__ import annotations

from typing import Any


def nowhere(module: Any) -> bool:
    """Most models: no layer, whatever the config holds."""
    return False


def everywhere(module: Any) -> bool:
    """Mistral: every layer, if the config has a window."""
    return True


def by_layer(module: Any) -> bool:
    """Gemma 2: the layers that were built with a window."""
    return getattr(module, "sliding_window", None) is not None


def by_kind(module: Any) -> bool:
    """EXAONE 4: the layers marked as sliding. The other layers hold the window and do not use it."""
    return bool(module.is_sliding)
