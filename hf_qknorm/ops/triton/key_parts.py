"""The gradients of keys and values whose blocks several programs share: their partial sums, added in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hf_qknorm.ops.triton.arguments import Constants
from hf_qknorm.ops.triton.head_tiles import load_tile, store_tile
from hf_qknorm.ops.triton.launch import as_tiles, launch, padded, uses_pointers
from hf_qknorm.ops.triton.raw_gradient import RawGradient
from hf_qknorm.ops.triton.undo_norm_rope import store_raw_gradient


@triton.jit(do_not_specialize=["heads_kv", "keys", "parts"])
def add_parts_kernel(
    DK_PARTS, DV_PARTS, X, DX, DV, norm, dgain, dbias, rotary, heads_kv, keys, parts,
    NORM: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gradients of the raw keys and of the values from partial sums `[B, Hk·parts, S, D]`, added in their order."""
    blocks = tl.cdiv(keys, C.BLOCK_N)
    number = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * C.BLOCK_N
    batch = number // heads_kv
    head_kv = number % heads_kv
    dk = tl.zeros([C.BLOCK_N, C.PADDED], tl.float32)
    dv = tl.zeros([C.BLOCK_N, C.PADDED], tl.float32)
    for part in tl.range(0, parts):
        dk += load_tile(DK_PARTS, batch, head_kv * parts + part, start, keys, C.BLOCK_N, C)
        dv += load_tile(DV_PARTS, batch, head_kv * parts + part, start, keys, C.BLOCK_N, C)
    store_tile(DV, dv, batch, head_kv, start, keys, C.BLOCK_N, C)
    store_raw_gradient(dk, X, DX, norm, dgain, dbias, rotary, batch, head_kv, start, keys, C.BLOCK_N, NORM, C)


def add_parts(dk_parts: Tensor, dv_parts: Tensor, raw: RawGradient, dk: Tensor, dv: Tensor) -> None:
    """Store dv and the raw gradient dk `[B, Hk, S, D]`, in blocks of `rows`, from sums `[B, Hk·parts, S, D]`."""
    _, heads_kv, keys, head_dim = dv.shape
    block = rows(head_dim)
    launch(
        add_parts_kernel,
        (raw.programs,),
        dv.device,
        DK_PARTS=as_tiles(dk_parts, block),
        DV_PARTS=as_tiles(dv_parts, block),
        DX=as_tiles(dk, block),
        DV=as_tiles(dv, block),
        heads_kv=heads_kv,
        keys=keys,
        parts=dk_parts.shape[1] // heads_kv,
        C=Constants(block, block, padded(head_dim), head_dim, POINTERS=uses_pointers(dv.device)),
        num_warps=4,
        **raw.arguments,
    )


def rows(head_dim: int) -> int:
    """Keys of a program: two tiles of sums, and two of what is added, fit the registers."""
    return max(16, 4096 // padded(head_dim))
