"""Names of repositories on the Hub, and the token to reach them with."""

from __future__ import annotations

import os
from typing import Any

from huggingface_hub import get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from hf_qknorm.files.formatting import shorten

TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def check_repo_id(value: Any, where: str, expected: str = "a name on the Hub, as OWNER/NAME") -> str:
    """Return `value` if it is a valid repository name. Raises ValueError, naming `where`, otherwise."""
    try:
        if not isinstance(value, str) or len(value) > 200:
            raise HFValidationError
        validate_repo_id(value)
    except HFValidationError:
        raise ValueError(f"{where} is {shorten(value)}, expected {expected}") from None
    return value


def check_optional_repo_id(value: Any, where: str) -> str | None:
    """Return `value` if it is a valid repository name or None. Raises ValueError, naming `where`, otherwise."""
    return None if value is None else check_repo_id(value, where, "a name on the Hub, as OWNER/NAME, or nothing")


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

    Raises ValueError for a token with an invalid character; the message does not contain the token.
    """
    used = token or get_token()
    invalid = next((c for c in used or "" if not ("!" <= c <= "~")), None)
    if invalid is not None:
        place = "token=" if token else "the one saved by `hf auth login`"
        if not token and (name := next((name for name in TOKEN_VARIABLES if os.environ.get(name)), None)):
            place = f"the environment's {name}"
        raise ValueError(
            f"the token for the Hub ({place}) holds the character U+{ord(invalid):04X}, which no token has: copy it "
            "again, without any text around it"
        )
    return used
