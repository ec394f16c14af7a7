"""Alias of `hf_qknorm.model.derived`: stand-alone code written by version 0.1.0 imports this name."""

from typing import Any

from hf_qknorm.model import derived


def __getattr__(name: str) -> Any:
    return getattr(derived, name)
