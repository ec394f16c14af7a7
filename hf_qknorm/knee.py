"""The knee of a patched model: how much of a vector's length its norms keep.

With ε = knee·P, where P is the mean |x|ᵖ of what arrives at a norm in calibration text, x/(mean |x|ᵖ + ε)^(1/p) leaves
vectors much shorter than (knee·P)^(1/p) as they are, up to a constant, and bounds longer ones as the plain norm does.
It is RMSNorm's own ε, made large.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import Any

from hf_qknorm.attention import head_norms, norm_copies, patched_layers, place

Powers = Mapping[tuple[str, str], float]  # the mean |x|ᵖ of what arrives at a norm, by its layer's name and its own


def put_knee(model: Any, knee: float, powers: Powers) -> None:
    """Give the norms of a patched model a knee, in place, and record it in layers and config; gains stay as they are.

    Raises ValueError, before anything is changed, for a knee that the scheme can't have, and for an offloaded one.
    """
    layers = patched_layers(model)
    for norm in (norm for layer in layers.values() for copies in norm_copies(layer).values() for norm in copies):
        norm.check_present()
    schemes = {name: dataclasses.replace(layer.scheme, knee=knee) for name, layer in layers.items()}
    for name, layer in layers.items():
        config: Any = layer.config
        config.set_scheme(schemes[name])
        layer.scheme = schemes[name]
        for norm_name, copies in norm_copies(layer).items():
            for norm in copies:
                norm.set_knee(knee, powers[name, norm_name], place(layer)[0])


def powers_of(model: Any) -> dict[tuple[str, str], float]:
    """The mean |x|ᵖ that each norm of a patched model was given. Raises ValueError for norms without a knee."""
    layers = patched_layers(model).items()
    return {(name, norm_name): norm.power for name, layer in layers for norm_name, norm in head_norms(layer).items()}


def take_knee(model: Any, knee: float) -> None:
    """Take weights, gains and ε, that were just loaded into a patched model from a checkpoint, for those of `knee`."""
    for layer in patched_layers(model).values():
        for norm in chain(*norm_copies(layer).values()):
            norm.knee = knee
    put_knee(model, knee, powers_of(model) if knee else defaultdict(float))
