"""Liger's kernels in Triton's interpreter, and models and modelling files as they are without Liger.

Liger's own functions change modelling files and PyTorch for the whole process: `without_traces` undoes that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton
import triton.language as tl
from liger_kernel.transformers import monkey_patch
from torch import nn
from transformers.activations import ACT2FN
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import TensorHandle

from qknorm_tests import interpreter

_convert_else = triton_interpreter._implicit_cvt


@contextmanager
def interpreted() -> Iterator[None]:
    """Let the interpreter run Liger's kernels; do nothing where kernels are compiled.

    The kernels cast their arguments that are floats, which the interpreter passes as Python's. They call functions of
    CUDA's library, which it lacks. The first setting of a kernel serves: it can't measure which one is fastest.
    """
    if not triton.knobs.runtime.interpret:
        yield
        return
    interpreter.install()
    for module in [module for name, module in sys.modules.items() if name.startswith("liger_kernel.ops.")]:
        for name, value in list(vars(module).items()):
            if isinstance(value, Autotuner):
                value.configs = value.configs[:1]
            elif name in ("rsqrt", "tanh") and "libdevice" in getattr(value, "__module__", ""):
                setattr(module, name, {"rsqrt": _rsqrt, "tanh": _tanh}[name])
    triton_interpreter._implicit_cvt = _convert
    try:
        yield
    finally:
        triton_interpreter._implicit_cvt = _convert_else


def _convert(argument: Any) -> Any:
    if isinstance(argument, float):
        return tl.tensor(TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)
    return _convert_else(argument)


@triton.jit
def _rsqrt(x):
    return tl.rsqrt(x)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@contextmanager
def without_traces() -> Iterator[None]:
    """Restore modelling files and their classes, transformers' activations, and PyTorch's own after the block."""
    files = [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]
    files = [module for module in files if ".modeling_" in module.__name__]
    owners: list[Any] = [*files, nn, nn.functional]
    for file in files:
        owners += [x for x in vars(file).values() if isinstance(x, type) and x.__module__ == file.__name__]
    before = [(owner, dict(vars(owner))) for owner in owners]
    activations = {name: dict.__getitem__(ACT2FN, name) for name in ACT2FN}  # its own `[]` makes a module
    try:
        yield
    finally:
        ACT2FN.update(activations)
        for owner, own in before:
            for name, value in own.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)


def replaced(model: nn.Module) -> dict[str, str]:
    """The modules of a model whose forward Liger has replaced, each with the name of the new one."""
    found = {name: vars(module).get("forward") for name, module in model.named_modules()}
    return {
        name: forward.__qualname__
        for name, forward in found.items()
        if getattr(forward, "__module__", "").startswith("liger_kernel.")
    }


TABLE = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
