"""The knee of a patched model: how much of a vector's length its norms keep.

Let P be the mean |x|ᵖ of a norm's inputs in calibration text, and ε = knee·P. Then x/(mean |x|ᵖ + ε)^(1/p) keeps the
length of vectors much shorter than (knee·P)^(1/p), up to a constant, and bounds longer ones as the norm without a knee
does. For RMSNorm this is its usual ε with a large value. A sharpness s has (mean |x|ᵖ)ˢ + εˢ under the root, and its
s-th root: shorter vectors keep their length more exactly, and longer ones are bounded alike.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor

from hf_qknorm.model.additions import device_and_dtype
from hf_qknorm.model.attention import head_norms, norm_copies, patched_layers
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.ops.norms import NORMS

NO_NORM: Final = 2.0**30  # from this knee on, a norm differs from a constant factor by less than a rounding in fp32

Powers = Mapping[tuple[str, str], float]  # the mean |x|ᵖ of a norm's inputs, by the names of its layer and of the norm


def apply_knee(model: Any, knee: float, powers: Powers, sharpness: int | None = None) -> None:
    """Set the knee of a patched model's norms, in place, and record it in layers and config. Gains don't change.

    The sharpness stays as it is if it is None.

    Raises ValueError, before anything changes, for a knee that the scheme can't have, an offloaded knee, and a power
    that is negative or not finite.
    """
    layers = patched_layers(model)
    schemes = {
        name: dataclasses.replace(layer.scheme, knee=knee, sharpness=sharpness or layer.scheme.sharpness)
        for name, layer in layers.items()
    }
    norms = [
        (norm, powers[name, norm_name], schemes[name].sharpness, device_and_dtype(layer)[0])
        for name, layer in layers.items()
        for norm_name, copies in norm_copies(layer).items()
        for norm in copies
    ]
    for norm, power, _, _ in norms:
        norm.check_present()
        if knee:
            norm.eps_of(knee, power)
    for name, layer in layers.items():
        config: Any = layer.config
        config.set_scheme(schemes[name])
        layer.scheme = schemes[name]
    for norm, power, sharp, device in norms:
        norm.scheme_sharpness = sharp
        norm.set_knee(knee, power, device)


def powers_of(model: Any) -> dict[tuple[str, str], float]:
    """Return the mean |x|ᵖ behind each norm's knee. Raises ValueError for norms without a knee."""
    layers = patched_layers(model).items()
    return {
        (name, norm_name): norm.mean_power() for name, layer in layers for norm_name, norm in head_norms(layer).items()
    }


def record_loaded_knee(model: Any, knee: float) -> None:
    """Record `knee` in a patched model whose gains and ε have just been loaded with that knee."""
    for layer in patched_layers(model).values():
        for norm in chain(*norm_copies(layer).values()):
            norm.knee = knee
    apply_knee(model, knee, powers_of(model) if knee else defaultdict(float))


def centred_and_size(norm: HeadNorm, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm's `vectors` x `[..., D]` (if centred x − mean x) and their mean |x|ᵖ `[...]`; fp32 at least."""
    x = x if x.dtype == torch.float64 else x.float()
    y = x - x.mean(-1, keepdim=True) if NORMS[norm.norm].centred else x
    return y, (y * y).mean(-1) if norm.order == 2 else y.abs().pow(norm.order).mean(-1)


def beyond_knee(norm: HeadNorm, x: Tensor) -> Tensor:
    """Return which heads of x `[..., H, D]` are in a vector longer than the norm's knee, mean |x|ᵖ > ε^(p/2).

    The result is bool `[..., H]`. The norm keeps the direction of such a vector rather than its length.
    """
    _, size = centred_and_size(norm, norm.vectors(x))
    size = size.expand(x.shape[:-1])
    return size > torch.as_tensor(norm.eps, dtype=size.dtype, device=size.device).pow(norm.order / 2)
