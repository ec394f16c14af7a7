"""The name by which the stand-alone code of version 0.1.0 asks for the derived classes."""

from typing import Any

from hf_qknorm.model import derived


def __getattr__(name: str) -> Any:
    return getattr(derived, name)
