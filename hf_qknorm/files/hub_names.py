"""Names of repositories on the Hub, and the token to reach them with."""

from __future__ import annotations

import os
from typing import Any

from huggingface_hub import get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from hf_qknorm.files.formatting import shorten


def check_repo_id(value: Any, where: str, expected: str = "a name on the Hub, as OWNER/NAME") -> str:
    """Return `value` if it is a valid repository name. Raises ValueError, naming `where`, otherwise."""
    try:
        if isinstance(value, str):
            validate_repo_id(value)
            return value
    except HFValidationError:
        pass
    raise ValueError(f"{where} is {shorten(value)}, expected {expected}")


def is_path(name: str) -> bool:
    """Return whether a name can only be a path: a repository name has the form OWNER/NAME at most."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def hub_name(name: str) -> str | None:
    """Return the name if it can only be one on the Hub; None if it is, or may be, a local path."""
    if is_path(name) or os.path.lexists(name):
        return None
    try:
        return check_repo_id(name, "name")
    except ValueError:
        return None


def hub_token(token: str | None = None) -> str | None:
    """Return `token`, or by default the token that this machine is logged in with, if any.

    Raises ValueError for a token with an invalid character, which a request's error would show with the token.
    """
    used = token or get_token()
    if used and not all("!" <= character <= "~" for character in used):
        raise ValueError(
            "the token for the Hub (token=, HF_TOKEN, or saved by `hf auth login`) holds a character that no token "
            "has: copy it again, without any text around it"
        )
    return used
