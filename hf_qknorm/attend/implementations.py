"""The implementations of attention, in the order in which `attn_implementation="hf_qknorm"` tries them.

On CUDA it takes the Triton kernels, FlexAttention, or tiled; on a CPU the C++ kernels or tiled; elsewhere tiled. The
interpreter of Triton's kernels is for tests. A name that asks for one implementation gets it or a ValueError.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from hf_qknorm.attend import cpu_kernels
from hf_qknorm.ops import flex, library, reference
from hf_qknorm.ops.checks import why_not_ranges
from hf_qknorm.ops.cpu import attention as cpu
from hf_qknorm.ops.trust import first_use
from hf_qknorm.ops.trust.code_path import OperatorName
from hf_qknorm.ops.types import ALL_KEYS, NO_OPTIONS, Call, Heads, LayerCache, Norm, Options, Rotary, Visible

logger = logging.getLogger(__name__)
_logged: set[str] = set()


class Implementation(NamedTuple):
    """An implementation of attention.

    `words` name it in logs. `why_not` returns the reason why it does not take a call, or None; the first call of a kind
    may compile and check it. `why_not_yet` is the same for "hf_qknorm", if that does not wait for a compiler. `run`
    computes `[B, H, T, D]`. "hf_qknorm" tries it on these `devices`, none for all. `name` is the name of the
    attention function that takes it or raises ValueError, if there is one. `takes_masks`: arbitrary masks too, and so a
    position bias in one.
    """

    words: str
    why_not: Callable[[Heads, Visible, Options], str | None]
    run: Callable[[Heads, Visible, Options], Tensor]
    devices: tuple[str, ...] = ()
    name: str | None = None
    takes_masks: bool = False
    why_not_yet: Callable[[Heads, Visible, Options], str | None] | None = None


def _why_not_triton(heads: Heads, visible: Visible, options: Options) -> str | None:
    reason = why_not_ranges(visible) or library.why_not_fused(*heads[:3])
    return reason or first_use.why_distrusted(heads, visible, options)


def _why_not_flex(heads: Heads, visible: Visible, options: Options) -> str | None:
    return flex.why_not(heads, visible, options) or first_use.why_distrusted(heads, visible, options, "flex")


TRITON: Final = Implementation(
    "its Triton kernels", _why_not_triton, library.fused_attention, ("cuda",), name="hf_qknorm_triton"
)
CPP: Final = Implementation(
    *("its C++ kernels", cpu_kernels.why_not, cpu.attention, ("cpu",)),
    name="hf_qknorm_cpu",
    why_not_yet=cpu_kernels.why_not_yet,
)
FLEX: Final = Implementation("FlexAttention", _why_not_flex, flex.attention, ("cuda",))
TILED: Final = Implementation(
    "tiled in PyTorch", lambda *call: None, library.attention, name="hf_qknorm_tiled", takes_masks=True
)
IMPLEMENTATIONS: Final = (TRITON, CPP, FLEX, TILED)


class Choice(NamedTuple):
    """The implementation of a call, and the reasons against the ones before it; None if there are none."""

    implementation: Implementation
    reason: str | None

    def __str__(self) -> str:
        return self.implementation.words if self.reason is None else f"{self.implementation.words}: {self.reason}"


def choose(call: Call) -> Choice:
    """The first implementation that takes a call of normed and rotated heads."""
    device, reasons = device_type(call.heads.q), []
    tried = [x for x in IMPLEMENTATIONS if not x.devices or device in x.devices]
    for implementation in tried:
        reason = (implementation.why_not_yet or implementation.why_not)(*call)
        if reason is None:
            break
        if reason not in reasons:
            reasons.append(reason)
    if tried == [TILED]:
        reasons.append("the kernels are for NVIDIA GPUs and CPUs")
    return Choice(implementation, "; ".join(reasons) or None)


def device_type(x: Tensor) -> str:
    """The type of a tensor's device, which `choose` looks for among the devices of implementations."""
    return x.device.type


def takes_in_one(module: nn.Module, call: Call) -> bool:
    """Whether the Triton kernels norm, rotate and attend in one launch for a layer that asks for kernels.

    Raises ValueError, with the reason, if they do not and the layer's attention function takes nothing else.
    """
    reason = TRITON.why_not(*call)
    if module.config._attn_implementation == TRITON.name:  # type: ignore[union-attr]
        refuse(reason, TRITON)
    if reason is None:
        log_once("runs its Triton kernels, norm and RoPE included")
    return reason is None


def norm_rope(module: nn.Module, heads: Heads) -> tuple[Tensor, Tensor]:
    """Norm and rotate queries and keys, in the kernel if it passed its self-check, else in PyTorch."""
    return library.norm_rope(heads) if _trusted(module, heads, "norm_rope") else reference.norm_rope(heads)


def norm_rope_one(module: nn.Module, x: Tensor, norm: Norm, rotary: Rotary | None) -> Tensor:
    """`norm_rope` of queries or keys alone."""
    trusted = _trusted(module, Heads(x, x, x, norm, Norm(), rotary), "norm_rope_one")
    return (library if trusted else reference).norm_rope_one(x, norm, rotary)


def step(module: nn.Module, call: Call, heads: Heads, filled: Tensor | None) -> Tensor:
    """`library.fused_step` if it passed its self-check, else norm and rotation, and attention by `run`.

    `heads` are the new ones. The `call` has the keys and values of a cache with room for them, and `filled` is as in
    `LayerCache`.
    """
    (_, keys, values, *_), visible, options = call.heads, call.visible, call.options
    operator: OperatorName = "append" if filled is None else "step"
    if _trusted(module, call.heads, operator, visible, options):
        log_once("runs its Triton kernels, norm and RoPE included")
        return library.fused_step(heads, LayerCache(keys, values, filled), visible, options)
    count = heads.q.shape[2]
    start = keys.shape[2] - count if filled is None else filled
    q, k = norm_rope(module, heads)
    for x, new in ((keys, k), (values, heads.v)):
        x.index_copy_(2, start + torch.arange(count, device=x.device), new)
    if filled is not None:
        filled.add_(count)
    return run(Call(Heads(q, keys, values), visible, options))


def run(call: Call) -> Tensor:
    """Attention by the first implementation that takes the call. The logged reason is its first call's."""
    choice = choose(call)
    log_once(f"runs {choice.implementation.words}", "" if choice.reason is None else f": {choice.reason}")
    return choice.implementation.run(*call)


def _trusted(
    module: nn.Module, heads: Heads, operator: OperatorName, visible: Visible = ALL_KEYS, options: Options = NO_OPTIONS
) -> bool:
    """Whether a kernel passed its self-check. Raises ValueError if it did not and the module asks for kernels."""
    reason = first_use.why_distrusted(heads, visible, options, operator)
    if reason is not None and module.config._attn_implementation == TRITON.name:  # type: ignore[union-attr]
        refuse(reason, TRITON)
    return reason is None


def refuse(reason: str | None, implementation: Implementation) -> None:
    """Raise ValueError if there is a reason why an implementation that was asked for by name does not take a call."""
    if reason is not None:
        raise ValueError(
            f'attn_implementation="{implementation.name}" can\'t serve this call: {reason}. Call '
            'model.set_attn_implementation("hf_qknorm"), which takes the kernels only where they serve'
        )


def log_once(message: str, details: str = "") -> None:
    """Log a message at info level, with the details of its first time, once a process; a traced graph is silent."""
    if torch.compiler.is_compiling() or message in _logged or not logger.isEnabledFor(logging.INFO):
        return
    _logged.add(message)
    logger.info("hf_qknorm attention %s%s", message, details)
