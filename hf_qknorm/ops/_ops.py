"""The namespace of the operators in `torch.ops`; a kernel for the Hub has a module of this interface of its own."""

from __future__ import annotations

import torch

NAMESPACE = "hf_qknorm"

ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(name: str) -> str:
    """The operator's name with its namespace."""
    return f"{NAMESPACE}::{name}"
