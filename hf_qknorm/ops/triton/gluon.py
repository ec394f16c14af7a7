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

from hf_qknorm.ops.triton.arguments import ScoreArguments, Sizes
from hf_qknorm.ops.triton.launch import INTERPRETED, LoopVariant, capability, constants, descriptor, launch
from hf_qknorm.ops.triton.norm_rope import PreparedHeads
from hf_qknorm.ops.triton.schedule import gpu, query_section
from hf_qknorm.ops.types import Options, Visible

SWITCH = "HF_QKNORM_GLUON"
HOPPER = (9, 0)  # its compute capability
HEAD_DIM = 128
QUERIES, KEYS, STAGES = 128, 128, 2  # queries of a program, 64 for each warpgroup; keys of a tile, tiles of a ring
FEWEST = 2  # programs for each processor: with fewer, the plain kernel has more of them


def serves(q: Tensor, visible: Visible, options: Options, statistics: bool) -> bool:
    """Whether the Gluon kernel serves a call with queries q `[B, H, T, D]`; never where the switch is off.

    Triton's interpreter knows no Gluon. Raises ValueError for a switch that is neither 1 nor 0.
    """
    if not switched_on() or INTERPRETED or capability(q.device) != HOPPER or _module() is None:
        return False
    supported = visible.ranges is None and visible.sinks is None and options.window is None and not options.dropout
    halves = q.dtype in (torch.bfloat16, torch.float16)
    b, h, t, head_dim = q.shape
    enough = -(-t // QUERIES) * b * h >= FEWEST * gpu(q.device).processors
    return supported and halves and enough and not statistics and head_dim == HEAD_DIM


def switched_on() -> bool:
    """Whether the environment allows the Gluon kernel, as it does by default."""
    value = os.environ.get(SWITCH) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH} must be 1 (the Gluon kernel where it is faster) or 0 (never), got {value!r}")
    return value == "1"


@cache
def _module() -> Any:
    """The kernel's module, imported on demand; None where Triton lacks it: Gluon differs between its versions."""
    try:
        from hf_qknorm.ops.triton import gluon_forward
    except (ImportError, AttributeError):
        return None
    return gluon_forward


def run(prepared: PreparedHeads, out: Tensor, normaliser: Tensor, causal: bool, variants: list[LoopVariant]) -> None:
    """Write out `[B, H, T, D]` and normaliser `[B, H, T, 2]`, with one loop or, by the heads' bounds, one of two."""
    b, h, t, _ = prepared.q.shape
    loops = {
        name: constants(
            *(QUERIES, KEYS, HEAD_DIM, HEAD_DIM),
            CAUSAL=causal,
            SCALED=prepared.scaled,
            TANH=tanh,
            ONLINE=online,
            WHEN=when,
        )
        for name, (tanh, online, when, _) in zip(("C", "BEYOND"), variants, strict=False)
    }
    launch(
        _module().gluon_forward_kernel,
        (-(-t // QUERIES) * b * h,),
        prepared.q.device,
        Q=_tiles(prepared.q, QUERIES // 2),
        K=_tiles(prepared.k, KEYS),
        V=_tiles(prepared.v, KEYS),
        OUT=_tiles(out, QUERIES // 2),
        normaliser=normaliser,
        bound=prepared.bound,
        score=ScoreArguments(prepared.unit, prepared.cap, limit=variants[0].limit),
        **Sizes(h, prepared.k.shape[1], t, prepared.k.shape[2], 0, query_section(*prepared[:2], QUERIES))._asdict(),
        STAGES=STAGES,
        **loops,
        num_warps=4,
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
