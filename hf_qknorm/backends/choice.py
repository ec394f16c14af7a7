"""Which implementation computes a call: kernels, if they serve it and passed their self-check, else PyTorch.

On CUDA the order is: Triton kernels, FlexAttention, tiled. On a CPU it is: C++ kernels, tiled; Triton's interpreter is
for tests. Everywhere else it is tiled alone. A name that asks for kernels gets them or a ValueError.
"""

from __future__ import annotations

import logging
import os
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from hf_qknorm.backends.calls import Operator
from hf_qknorm.ops import flex, library, reference
from hf_qknorm.ops.cpu import attention as cpu
from hf_qknorm.ops.cpu import use as cpu_use
from hf_qknorm.ops.trust import first_use
from hf_qknorm.ops.trust.code_path import Operator as OperatorName
from hf_qknorm.ops.types import Heads, LayerCache, Norm, Options, Rotary, Visible

logger = logging.getLogger(__name__)
_logged: set[str] = set()

KERNELS_ON_CPU = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's, for tests
EXPLICIT: Final = "hf_qknorm_triton"
EXPLICIT_CPU: Final = "hf_qknorm_cpu"
NOTHING, NO_OPTIONS = Visible(), Options(1.0)  # of norm and rotation


class Choice(NamedTuple):
    """The implementation of a call, in words, and the reasons against those before it; None for the first."""

    name: str
    operator: Operator
    reason: str | None

    def __str__(self) -> str:
        return self.name if self.reason is None else f"{self.name}: {self.reason}"


CPP: Final = Choice("its C++ kernels", cpu.attention, None)


def on_gpu(x: Tensor) -> bool:
    """Whether "hf_qknorm" may run kernels for a tensor: on CUDA, and never in Triton's interpreter."""
    return x.is_cuda


def why_not_kernels(heads: Heads, visible: Visible, options: Options) -> str | None:
    """The reason why the kernels do not take a call, or None; their first call checks them."""
    if visible.mask is not None:
        return f"the mask {list(visible.mask.shape)} is an arbitrary one, and not a range of keys for each query"
    return library.why_not_fused(*heads[:3]) or first_use.why_distrusted(heads, visible, options)


def choose(heads: Heads, visible: Visible, options: Options) -> Choice:
    """The implementation of a call of `attn_implementation="hf_qknorm"`."""
    if not on_gpu(heads.q):
        cpu_device, only = heads.q.device.type == "cpu", "the kernels are for NVIDIA GPUs and CPUs"
        reason = cpu_use.why_not(heads, visible, options) if cpu_device else only
        return CPP if reason is None else Choice("tiled in PyTorch", library.attention, reason)
    reason = why_not_kernels(heads, visible, options)
    if reason is None:
        name = "its Triton kernels, norm and RoPE included" if heads.raw else "its Triton kernels"
        return Choice(name, library.fused_attention, None)
    if heads.raw:
        return Choice("norm and RoPE in PyTorch", _normed_attention, reason)
    against = flex.why_not(heads, visible, options) or first_use.why_distrusted(heads, visible, options, "flex")
    if against is None:
        return Choice("FlexAttention", flex.attention, reason)
    return Choice("tiled in PyTorch", library.attention, reason if against in reason else f"{reason}; {against}")


def best_attention(heads: Heads, visible: Visible, options: Options) -> Tensor:
    """Attention by the first implementation that takes the call, with the heads' norms and rotation."""
    choice = choose(heads, visible, options)
    log_once("runs %s", choice)
    return choice.operator(heads, visible, options)


def kernel_attention(heads: Heads, visible: Visible, options: Options) -> Tensor:
    """`library.fused_attention`. Raises ValueError if the self-check failed."""
    refuse(first_use.why_distrusted(heads, visible, options))
    return library.fused_attention(heads, visible, options)


def cpp_attention(heads: Heads, visible: Visible, options: Options) -> Tensor:
    """The C++ kernels. Raises ValueError if they do not serve the call."""
    refuse(cpu_use.why_not(heads, visible, options), EXPLICIT_CPU)
    return cpu.attention(heads, visible, options)


def norm_rope(module: nn.Module, heads: Heads) -> tuple[Tensor, Tensor]:
    """Norm and rotate queries and keys, in the kernel if it passed its self-check, else in PyTorch."""
    return library.norm_rope(heads) if _trusted(module, heads, "norm_rope") else reference.norm_rope(heads)


def norm_rope_one(module: nn.Module, x: Tensor, norm: Norm, rotary: Rotary | None) -> Tensor:
    """`norm_rope` of queries or keys alone."""
    trusted = _trusted(module, Heads(x, x, x, norm, Norm(), rotary), "norm_rope_one")
    return (library if trusted else reference).norm_rope_one(x, norm, rotary)


def norm_rope_into(module: nn.Module, heads: Heads, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """`norm_rope` that writes the new keys and values to a static cache, and returns the queries."""
    if _trusted(module, heads, "norm_rope_into"):
        return library.norm_rope_into(heads, keys, values, positions)
    q, k = reference.norm_rope(heads)
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, heads.v)
    return q


def step(module: nn.Module, heads: Heads, cache: LayerCache, visible: Visible, options: Options) -> Tensor:
    """`library.fused_step` if it passed its self-check, else its parts, each by the first implementation for it."""
    (keys, values, filled), count = cache, heads.q.shape[2]
    operator: OperatorName = "append" if filled is None else "step"
    if _trusted(module, heads._replace(k=keys, v=values), operator, visible, options):
        log_once("runs its Triton kernels, norm and RoPE included")
        return library.fused_step(heads, cache, visible, options)
    start = keys.shape[2] - count if filled is None else filled
    q = norm_rope_into(module, heads, keys, values, start + torch.arange(count, device=keys.device))
    if filled is not None:
        filled.add_(count)
    return best_attention(Heads(q, keys, values), visible, options)


def _normed_attention(heads: Heads, visible: Visible, options: Options) -> Tensor:
    """Norm and rotation in PyTorch, and the next implementation for the attention."""
    return best_attention(Heads(*reference.norm_rope(heads), heads.v), visible, options)


def _trusted(
    module: nn.Module, heads: Heads, operator: OperatorName, visible: Visible = NOTHING, options: Options = NO_OPTIONS
) -> bool:
    """Whether a kernel passed its self-check. Raises ValueError if it did not and the module asks for kernels."""
    reason = first_use.why_distrusted(heads, visible, options, operator)
    if reason is not None and module.config._attn_implementation == EXPLICIT:  # type: ignore[union-attr]
        refuse(reason)
    return reason is None


def refuse(reason: str | None, name: str = EXPLICIT) -> None:
    """Raise ValueError if there is a reason why the kernels, which were asked for by name, do not take a call."""
    if reason is not None:
        raise ValueError(
            f'attn_implementation="{name}" can\'t serve this call: {reason}. Call '
            'model.set_attn_implementation("hf_qknorm"), which takes the kernels only where they serve'
        )


def log_once(message: str, *arguments: object) -> None:
    """Log at info level which implementation runs, once a process; a traced graph is silent."""
    if torch.compiler.is_compiling() or not logger.isEnabledFor(logging.INFO):
        return
    line = message % arguments
    if line not in _logged:
        _logged.add(line)
        logger.info("hf_qknorm attention %s", line)
