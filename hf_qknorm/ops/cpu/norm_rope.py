"""Norm and RoPE in C++ on the CPU, without gradients: one call in the place of thirty of torch's."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from hf_qknorm.ops.cpu import build
from hf_qknorm.ops.norms import NORMS
from hf_qknorm.ops.types import Norm, Rotary

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
MOST_COLUMNS: Final = 256


def norm_rope_one(x: Tensor, norm: Norm, rotary: Rotary | None) -> Tensor:
    """`reference.norm_rope_one` of heads `[B, H, T, D]`, rounded once; the result is laid out as `[B, T, H, D]`.

    It has no gradient. The caller asks `use.serves_norm_rope`. Raises RuntimeError where the kernels can't be compiled.
    """
    name, gain, bias, _, eps, _ = norm
    kind, (cos, sin, interleaved) = NORMS.get(name), (None, None, False) if rotary is None else rotary
    switches = (False, False, False) if kind is None else (True, kind.centred, kind.summed)
    x = x if x.stride(3) == 1 else x.contiguous()
    result: Tensor = build.operators().norm_rope(x, *switches, gain, bias, float(eps), cos, sin, interleaved)
    return result


def takes(x: Tensor, norm: Norm) -> bool:
    """Whether `norm_rope_one` takes these heads; `use.serves_norm_rope` knows whether they are trusted."""
    known = norm.kind == "none" or (norm.kind in NORMS and not NORMS[norm.kind].any_order)
    fits = x.device.type == "cpu" and x.dtype in DTYPES and x.shape[3] <= MOST_COLUMNS
    return known and fits and norm.blend is None and type(x) is Tensor
