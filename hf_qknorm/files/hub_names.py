"""Names of repositories on the Hub."""

from __future__ import annotations

import os
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from hf_qknorm.files.formatting import shorten


def is_repo_id(value: Any) -> bool:
    """Return whether `value` is a valid name of a repository."""
    try:
        validate_repo_id(value)
        return value is not None
    except HFValidationError:
        return False


def check_repo_id(value: Any, where: str) -> str:
    """Return `value` if it is a valid name of a repository. Raises ValueError, naming `where`, otherwise."""
    if not is_repo_id(value):
        raise ValueError(f"{where} is {shorten(value)}, expected a name on the Hub, as OWNER/NAME")
    return str(value)


def hub_name(name: str) -> str | None:
    """Return the name if it can only be one on the Hub; None if it is, or may be, a local path."""
    return name if is_repo_id(name) and not os.path.lexists(name) else None
