"""Liger's kernels on patched models: its functions by model type, and its replacement of modules' methods."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from typing import Any

from torch import nn

from hf_qknorm.families import known_types
from hf_qknorm.families.class_names import TYPE_PREFIX
from hf_qknorm.files.log import logger


def add_kernels(monkey_patch: Any) -> None:
    """Give every derived model type the Liger kernels of its base."""
    table = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    table.update({f"{TYPE_PREFIX}{known}": _for_derived(known, table.get(known)) for known in known_types()})


def spare_norms(bind: Callable[..., None], /, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Let Liger's function that replaces a module's method pass over patched modules and removed norms."""
    ours = type(module).__module__.partition(".")[0] == "hf_qknorm"
    if not ours and not isinstance(module, nn.Identity):  # which takes the place of a removed norm
        bind(module, *args, **kwargs)


def _for_derived(model_type: str, apply: Callable[..., None] | None) -> Callable[..., None]:
    """Return the function for a derived type: `apply`, Liger's for its base `model_type`, or a warning without one.

    RoPE is left to the patched attention by default: its kernels fuse it, and Liger's writes into its inputs. The
    function raises RuntimeError where Liger's kernels can't run. A type that keeps its base's name in memory gets its
    base's function, with RoPE.
    """
    if apply is None:
        return partial(_warn, model_type)
    if "rope" in inspect.signature(apply).parameters:
        apply = partial(apply, rope=False)

    @wraps(apply)  # Liger passes the arguments of the signature
    def checked(**kwargs: Any) -> None:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if import_module("liger_kernel.utils").infer_device() == "cpu" and not interpreted:
            raise RuntimeError(
                "Liger's kernels can't run here: they are written in Triton, and torch finds no GPU (CUDA, ROCm, XPU "
                "or NPU). Set use_liger_kernel=False, or load the model by AutoModelForCausalLM"
            )
        apply(**kwargs)

    return checked


def _warn(model_type: str, **kwargs: Any) -> None:
    """Log that nothing is applied: for a type that is not in its table, Liger says so at info level alone."""
    logger.warning("Liger has no kernels for models of type %s: this patched model runs without them", model_type)
