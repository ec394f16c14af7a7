"""Which layers of a model attend through a sliding window: those whose masks transformers builds with one.

How far the window reaches is `config.sliding_window`, which the masks are built by too.
"""

from __future__ import annotations

from typing import Any


def nowhere(module: Any) -> bool:
    """Most models: no layer, whatever the config holds."""
    return False


def everywhere(module: Any) -> bool:
    """Mistral: every layer, where the config has a window."""
    return True


def by_layer(module: Any) -> bool:
    """Gemma 2: the layers that were built with a window."""
    return getattr(module, "sliding_window", None) is not None


def by_kind(module: Any) -> bool:
    """EXAONE 4: the layers of that kind; the others hold the window and don't use it."""
    return bool(module.is_sliding)
