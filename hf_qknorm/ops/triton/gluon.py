"""The warp-specialised forward pass of `gluon_forward`: who gets it, and how it is started.

No GPU has run it yet, so it is for those who ask: with HF_QKNORM_GLUON=1 in the environment it serves the calls that it
can take, causal or not, with or without a cap, and the plain kernel all others. That is decided here, in `serves`.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from hf_qknorm.ops.triton.launch import INTERPRETED, Loop, descriptor, launch, padded
from hf_qknorm.ops.types import Options, Visible

if TYPE_CHECKING:
    from hf_qknorm.ops.triton.attention import Ready

SWITCH = "HF_QKNORM_GLUON"
QUERIES = 128  # of a program: 64 for each warpgroup
# Keys of a tile and tiles of a ring, by head_dim rounded up to a power of two.
TILES: dict[int, tuple[int, int]] = {64: (128, 3), 128: (128, 2), 256: (64, 2)}


def serves(q: Tensor, visible: Visible, options: Options, statistics: bool) -> bool:
    """Whether the Gluon kernel takes a call with queries q `[B, H, T, D]`; no one gets it who has not asked.

    Raises RuntimeError where it is asked for and can't run at all, and ValueError for a switch that is neither on nor
    off.
    """
    if not _asked():
        return False
    reason = why_not(q.device)
    if reason is not None:
        raise RuntimeError(f"{SWITCH}=1 asks for the Gluon kernel, but {reason}: unset it to get the plain kernel")
    plain = visible.ranges is None and visible.sinks is None and options.window is None and not options.dropout
    halves = q.dtype in (torch.bfloat16, torch.float16)
    return plain and halves and not statistics and padded(q.shape[-1]) in TILES


def _asked() -> bool:
    value = os.environ.get(SWITCH, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH} must be 1 (the Gluon kernel where it can serve) or 0 (never), got {value!r}")
    return value == "1"


def why_not(device: torch.device) -> str | None:
    """Why the Gluon kernel can't run on a device, or None if it can; for the CPU, without interpreter, it compiles."""
    if INTERPRETED:
        return "Triton's interpreter knows no Gluon"
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        return f"it is for Hopper, compute capability 9, and {device} has {torch.cuda.get_device_capability(device)}"
    try:
        _module()
    except (ImportError, AttributeError) as error:
        return f"Triton {triton.__version__} lacks what it needs of Gluon, as 3.6 to 3.9 have it ({error})"
    return None


def _module() -> Any:
    """The kernel's module, which only those who want it import: Gluon is another one with each Triton."""
    from hf_qknorm.ops.triton import gluon_forward

    return gluon_forward


def attend(ready: Ready, out: Tensor, normaliser: Tensor, causal: bool, loop: Loop) -> None:
    """Write out `[B, H, T, D]` and normaliser `[B, H, T, 2]` of the heads that this loop is for."""
    b, h, t, head_dim = ready.q.shape
    keys, stages = TILES[padded(head_dim)]
    launch(
        _module().gluon_forward_kernel,
        (-(-t // QUERIES) * b * h,),
        ready.q.device,
        _tiles(ready.q, QUERIES // 2),
        _tiles(ready.k, keys),
        _tiles(ready.v, keys),
        _tiles(out, QUERIES // 2),
        normaliser,
        ready.bound,
        ready.unit,
        ready.cap,
        loop.limit,
        h,
        ready.k.shape[1],
        t,
        ready.k.shape[2],
        BLOCK_M=QUERIES,
        BLOCK_N=keys,
        PADDED=padded(head_dim),
        STAGES=stages,
        CAUSAL=causal,
        TANH=loop.tanh,
        ONLINE=loop.online,
        WHEN=loop.when,
        SCALED=ready.scaled,
        num_warps=4,
    )


def _tiles(x: Tensor, rows: int) -> Any:
    """`launch.descriptor`, for Gluon: with the layout that tiles have in shared memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    plain = descriptor(x, rows)
    layout = _layout(rows, padded(x.shape[-1]), x.dtype)
    return TensorDescriptor(x, plain.shape, plain.strides, plain.block_shape, layout)


@cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], getattr(gl, str(dtype).removeprefix("torch.")))
