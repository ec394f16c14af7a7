"""The knee of a patched model: how much of a vector's length its norms keep.

Let P be the mean |x|ᵖ of a norm's inputs in calibration text, and ε = knee·P. Then x/(mean |x|ᵖ + ε)^(1/p) keeps the
length of vectors much shorter than (knee·P)^(1/p), up to a constant, and bounds longer ones as the norm without a knee
does. For RMSNorm this is its usual ε with a large value. A sharpness s has (mean |x|ᵖ)ˢ + εˢ under the root, and its
s-th root: shorter vectors keep their length more exactly, and longer ones are bounded alike.

The norm multiplies by the same root for P, so that a vector of mean |x|ᵖ = P keeps its length at any knee.
"""

from __future__ import annotations

import statistics
from typing import Final

import torch
from torch import Tensor, nn

from hf_qknorm.model.adapters import check_held
from hf_qknorm.model.attention import head_norms, norm_copies, patched_layers, require_patched
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.model.rollback import undone_on_error
from hf_qknorm.norms import NORMS, OPENED

NO_NORM: Final = 2.0**OPENED  # from this knee on, a norm differs from a constant factor by less than a rounding in fp32


@torch.no_grad()
def set_knee(model: nn.Module, knee: float) -> None:
    """Set the knee of a patched and calibrated model, in place, between two steps of training.

    A vector of the calibration's mean length keeps its length, and gains and sharpness don't change. A knee of 0 is
    RMSNorm's own form. From 2³⁰ on the knee is ∞: the norms then multiply by a constant, and `remove_norms` can fold
    them away. Of norms that PEFT's adapters hold, their copies are changed, each by its own calibration, and the base's
    norms are not. Every rank makes the call.

        >>> _ = qk.calibrate(qk.patch_model(model, "qk_norm"), texts, knee=4.0)
        >>> qk.set_knee(model, 2.0)

    Raises ValueError, with the model unchanged, for a model that is not patched or has no norms, norms that hold no
    mean length (plain ones, and those calibrated for an export), are offloaded or in no adapter, and an invalid knee.
    """
    require_patched(model)
    if not knee >= 0:
        raise ValueError(f"knee={knee}: expected a number ≥ 0")
    shapes = [(norm, norm.rounded(knee, norm.mean_power(), norm.shape.sharpness)) for norm in check_norms(model)]
    with undone_on_error() as keep:
        for norm, shape in shapes:
            if norm.shape != shape:
                keep(norm.knee)
                norm.set_shape(shape)


def check_norms(model: nn.Module) -> list[HeadNorm]:
    """Return the norms of a patched model, of those that adapters hold the copies.

    Raises ValueError unless their knee can move, and is saved with adapters.
    """
    norms: list[HeadNorm] = []
    for layer in patched_layers(model).values():
        for name, (base, *copies) in norm_copies(layer).items():
            merged = getattr(layer.get_submodule(name), "merged", False)  # PEFT has then exchanged base and copy
            norms += [base, *copies] if merged or not copies else copies
    if not norms:
        raise ValueError("the model's scheme has no norms, and so no knee")
    if any(norm.knee.is_meta for norm in norms):
        raise ValueError("the norms are offloaded: load the model without offload_buffers=True to change its knee")
    for norm in norms:
        norm.mean_power()
    check_held(model)
    return norms


def knee_of(model: nn.Module) -> float:
    """The knee of a patched model, 0 without one, ∞ if opened. Raises ValueError for a model that is not patched.

    It is the median of the norms', which differ by the rounding of their shapes. Norms that hold no mean length have 0.
    """
    norms = [norm for layer in require_patched(model).values() for norm in head_norms(layer).values()]
    return statistics.median([norm.ratio if norm.shape.power else 0.0 for norm in norms] or [0.0])


def sharpness_of(model: nn.Module) -> float:
    """The largest sharpness of a patched model's norms; 1 is RMSNorm's form."""
    layers = patched_layers(model).values()
    return max((norm.shape.sharpness for layer in layers for norm in head_norms(layer).values()), default=1.0)


def centred_and_size(norm: HeadNorm, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm's inputs x `[..., D]` (if centred x − mean x) and their mean |x|ᵖ `[...]`; fp32 at least."""
    x = x if x.dtype == torch.float64 else x.float()
    y = x - x.mean(-1, keepdim=True) if NORMS[norm.norm].centred else x
    return y, (y * y).mean(-1) if norm.order == 2 else y.abs().pow(norm.order).mean(-1)
