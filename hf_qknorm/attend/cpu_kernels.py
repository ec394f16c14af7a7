"""Whether the C++ kernels serve a call: by the variable HF_QKNORM_CPU, this machine, and the self-check."""

from __future__ import annotations

import multiprocessing
import os
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hf_qknorm.ops.cpu import attention, build, norm_rope
from hf_qknorm.ops.traces import constant_in_traces
from hf_qknorm.ops.trust import first_use
from hf_qknorm.ops.trust.code_path import OperatorName
from hf_qknorm.ops.types import ALL_KEYS, NO_OPTIONS, Heads, Norm, Options, Rotary, Visible

SWITCH: Final = "HF_QKNORM_CPU"
_served: set[tuple[Any, ...]] = set()  # kinds of calls: to look up a verdict takes as long as a step of generation


def why_not_yet(heads: Heads, visible: Visible, options: Options) -> str | None:
    """`why_not`, but inference does not wait for the compiler.

    A training step does, so that its recomputation under checkpointing is the same.
    """
    return why_not(heads, visible, options, wait=torch.is_grad_enabled() or not options.dropout <= 0)


def why_not(
    heads: Heads, visible: Visible, options: Options, operator: OperatorName = "cpu", wait: bool = True
) -> str | None:
    """The reason why the kernels do not serve a call, or None; the operators are "cpu" and "cpu_statistics".

    The first call of a machine compiles them, and the first call of each kind checks them; a trace does neither.

    Raises RuntimeError if HF_QKNORM_CPU=1 demands kernels that can't be compiled or fail their check, and ValueError
    for a switch that is neither 1 nor 0.
    """
    traced = torch.compiler.is_compiling() or isinstance(heads.q, FakeTensor)
    kind = None if traced else _kind(heads, visible, options, operator)
    if kind is not None and kind in _served:
        return None
    reason = attention.why_not(heads, visible, options) or why_not_here(traced, torch.compiler.is_exporting(), wait)
    if reason is not None:
        return reason
    reason = first_use.why_distrusted(heads, visible, options, operator)
    if reason is not None:
        return _refused(reason)
    if kind is not None and first_use.has_verdict(heads, visible, options, operator):
        _served.add(kind)
    return None


def _kind(heads: Heads, visible: Visible, options: Options, operator: OperatorName) -> tuple[Any, ...]:
    """The properties of a call by which the kernels serve it, on a machine that has them."""
    (q, k, v, *_), (ranges, sinks, _, mask) = heads, visible
    gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    shape = q.shape[1], k.shape[1], q.shape[3], k.shape[2] > attention.MOST_KEYS
    given = heads.raw, gradient, ranges is None, sinks is None, mask is None
    switches = os.environ.get(SWITCH), os.environ.get(first_use.SWITCH)
    return operator, *switches, q.device, q.dtype, *shape, *given, options


def serves_norm_rope(x: Tensor, norm: Norm, rotary: Rotary | None) -> bool:
    """Whether `norm_rope.norm_rope` serves heads, where the kernels are there (`is_ready`).

    The first call of each kind checks it. Raises RuntimeError if HF_QKNORM_CPU=1 demands a kernel that fails its check.
    """
    if not norm_rope.takes(x, norm, rotary):
        return False
    key = _norm_rope_kind(x, norm, rotary)
    if key in _served:
        return True
    heads = Heads(x, x, x, norm, Norm(), rotary)
    reason = first_use.why_distrusted(heads, ALL_KEYS, NO_OPTIONS, "cpu_norm_rope")
    if reason is not None:
        _refused(reason)
        return False
    if first_use.has_verdict(heads, ALL_KEYS, NO_OPTIONS, "cpu_norm_rope"):
        _served.add(key)
    return True


def _norm_rope_kind(x: Tensor, norm: Norm, rotary: Rotary | None) -> tuple[Any, ...]:
    """The properties of heads by which a kernel norms and rotates them; without lengths, which vary too much."""
    turned = rotary and (rotary.cos.shape[2], rotary.cos.dtype, rotary.interleaved)
    return torch.is_grad_enabled(), x.dtype, x.shape[3], turned, *_norm_kind(norm)


def _norm_kind(norm: Norm) -> tuple[Any, ...]:
    kind, gain, bias, blend, eps, _, sharpness = norm
    shapes = gain is not None and (gain.shape, gain.dtype), bias is not None and (bias.shape, bias.dtype)
    return kind, sharpness, blend is None, isinstance(eps, Tensor), *shapes


def serves_append(heads: Heads) -> bool:
    """Whether `norm_rope.append` serves new heads without gradients, where the kernels are there (`is_ready`)."""
    q, k, _, q_norm, k_norm, rotary = heads
    turned = rotary and (rotary.cos.shape, rotary.cos.dtype, rotary.interleaved)
    key = q.shape, k.shape, q.dtype, turned, *_norm_kind(q_norm), *_norm_kind(k_norm)
    if key in _served:
        return True
    sides = (q, q_norm, rotary), (k, k_norm, rotary)
    if not all(norm_rope.takes(*side) for side in sides):
        return False
    if heads.raw and not all(serves_norm_rope(*side) for side in sides):
        return False
    if not heads.raw or all(_norm_rope_kind(*side) in _served for side in sides):  # else it is checked later
        _served.add(key)
    return True


def is_ready() -> bool:
    """Whether the kernels are loaded, or were compiled before this process, without an attempt to compile them.

    HF_QKNORM_CPU=0 turns them off.
    """
    return os.environ.get(SWITCH) != "0" and (build.is_loaded() or _was_compiled())


@cache
def _was_compiled() -> bool:
    return build.why_not_ready() is None


@constant_in_traces
def why_not_here(traced: bool = False, exported: bool = False, wait: bool = True) -> str | None:
    """The reason why the kernels do not run in this process, or None. They are compiled if they were not before.

    Without `wait` it returns while the compiler works, unless the kernels are demanded. Nothing is compiled in a trace,
    nor in a daemon, such as a worker of a DataLoader: many start at once.
    """
    wanted = os.environ.get(SWITCH)
    if wanted not in (None, "0", "1"):
        raise ValueError(f"{SWITCH} must be 1 (demand the C++ kernels) or 0 (never use them), got {wanted!r}")
    if wanted == "0":
        return f"{SWITCH}=0 turns the C++ kernels off"
    if exported:
        return "an exported graph runs on machines without the C++ kernels, too"
    many = multiprocessing.current_process().daemon
    reason = build.why_not_ready() if traced or many else build.why_not_built(wait or wanted == "1")
    return reason if reason is None else _refused(reason)


def _refused(reason: str) -> str:
    """The same reason. Raises RuntimeError if the kernels are demanded."""
    if os.environ.get(SWITCH) == "1":
        raise RuntimeError(
            f"{SWITCH}=1 demands the C++ kernels for attention on a CPU, which do not run here: {reason}. Remove the "
            f"cause, or unset {SWITCH}, to compute attention in PyTorch"
        )
    return reason
