"""Why the model types that have no line in `FAMILIES` can't be patched."""

from __future__ import annotations

from typing import Final

REFUSED: Final[dict[str, str]] = {}
