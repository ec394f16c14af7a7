"""Choosing and launching the warp-specialised forward pass of `gluon_forward`, for Hopper.

It serves heads of 128 columns, causal or not, with or without a cap. At 64 columns the plain kernel is faster. That
serves all others, and with HF_QKNORM_GLUON=0 in the environment these too.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hf_qknorm.ops.triton.architectures import Tile
from hf_qknorm.ops.triton.arguments import Sizes
from hf_qknorm.ops.triton.launch import INTERPRETED, capability, descriptor, launch
from hf_qknorm.ops.triton.norm_rope import PreparedHeads
from hf_qknorm.ops.triton.schedule import gpu, query_section
from hf_qknorm.ops.types import Options, Visible

SWITCH = "HF_QKNORM_GLUON"
HOPPER = (9, 0)  # its compute capability
HEAD_DIM = 128
TILE = Tile(128, 128, 4, 2)  # queries of a program, 64 for each warpgroup; its stages are the tiles of a ring
FEWEST = 2  # programs for each processor: with fewer, the plain kernel has more of them


def serves(q: Tensor, visible: Visible, options: Options, statistics: bool) -> bool:
    """Whether the Gluon kernel serves a call with queries q `[B, H, T, D]`; never where the switch is off.

    Triton's interpreter knows no Gluon. Raises ValueError for a switch that is neither 1 nor 0.
    """
    switch = os.environ.get(SWITCH) or "1"
    if switch not in ("0", "1"):
        raise ValueError(f"{SWITCH} must be 1 (the Gluon kernel where it is faster) or 0 (never), got {switch!r}")
    if switch == "0" or INTERPRETED or capability(q.device) != HOPPER or _module() is None:
        return False
    supported = visible.ranges is None and visible.sinks is None and options.window is None and not options.dropout
    halves = q.dtype in (torch.bfloat16, torch.float16)
    b, h, t, head_dim = q.shape
    enough = -(-t // TILE.queries) * b * h >= FEWEST * gpu(q.device).processors
    return supported and halves and enough and not statistics and head_dim == HEAD_DIM


@cache
def _module() -> Any:
    """The kernel's module, imported on demand; None where Triton lacks it: Gluon differs between its versions."""
    try:
        from hf_qknorm.ops.triton import gluon_forward
    except (ImportError, AttributeError):
        return None
    return gluon_forward


def run(prepared: PreparedHeads, out: Tensor, normaliser: Tensor, loops: dict[str, Any]) -> None:
    """Write out `[B, H, T, D]` and normaliser `[B, H, T, 2]`, with one loop or, by the heads' bounds, one of two."""
    (b, h, t, _), (q, k, v, *_), (queries, keys, *_) = out.shape, prepared, TILE
    launch(
        _module().gluon_forward_kernel,
        (-(-t // queries) * b * h,),
        q.device,
        Q=_tiles(q, queries // 2),
        K=_tiles(k, keys),
        V=_tiles(v, keys),
        OUT=_tiles(out, queries // 2),
        normaliser=normaliser,
        bound=prepared.bound,
        **Sizes(h, k.shape[1], t, k.shape[2], 0, query_section(q, k, queries))._asdict(),
        STAGES=TILE.stages,
        **loops,
        num_warps=TILE.warps,
    )


def _tiles(x: Tensor, rows: int) -> Any:
    """`launch.descriptor`, for Gluon: with the layout that tiles have in shared memory."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    plain = descriptor(x, rows)
    return TensorDescriptor(x, plain.shape, plain.strides, plain.block_shape, _layout(rows, x.dtype))


@cache
def _layout(rows: int, dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, HEAD_DIM], getattr(gl, str(dtype).removeprefix("torch.")))
