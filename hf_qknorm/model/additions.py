"""The norms that a scheme adds to an attention layer."""

from __future__ import annotations

from typing import Any

import torch

from hf_qknorm.model.accelerate_hooks import execution_device
from hf_qknorm.model.norms import HeadNorm, initial_scalar_gain
from hf_qknorm.scheme import Scheme

# The scheme's norms in a layer, and the field of the scheme that each is for. Those of RoPE are for models in which the
# parts of a head with and without RoPE are normed separately.
NORM_FIELDS = {"q_norm": "q", "k_norm": "k", "v_norm": "v", "q_rope_norm": "q", "k_rope_norm": "k"}


def add_norms(module: Any, scheme: Scheme) -> None:
    """Add the scheme's norms, with fresh values, to a patched attention module."""
    if not scheme.norms:
        return
    style, (device, dtype) = module.family.style, device_and_dtype(module)
    for name, (heads, width) in style.norm_sizes(module).items():
        field = NORM_FIELDS[name]
        norm = getattr(scheme, field)
        if norm is None:
            continue
        gain, initial_gain = True, 1.0
        if scheme.gain == "scalar" and field != "v":  # one g a layer: the queries' norm holds it, if they have one
            gain = field == "q" or scheme.q is None
            initial_gain = initial_scalar_gain(scheme, norm, style.length(module), width, module.logit_scale)
        new = HeadNorm(norm, scheme, heads, width, gain=gain, initial_gain=initial_gain, device=device, dtype=dtype)
        setattr(module, name, new)


def device_and_dtype(module: Any) -> tuple[torch.device, torch.dtype]:
    """Device and dtype for new parameters: the projections', or the device on which a hook runs offloaded ones."""
    projection = module.get_submodule(module.family.style.weights[0])
    weight = next(projection.parameters())
    device = execution_device(projection, module) if weight.is_meta else None
    return device or weight.device, weight.dtype
