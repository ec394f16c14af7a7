"""The knee of a patched model: how much of a vector's length its norms keep.

Let P be the mean |x|ᵖ of a norm's inputs in calibration text, and ε = knee·P. Then x/(mean |x|ᵖ + ε)^(1/p) keeps the
length of vectors much shorter than (knee·P)^(1/p), up to a constant, and bounds longer ones as the norm without a knee
does. For RMSNorm this is its usual ε with a large value. A sharpness s has (mean |x|ᵖ)ˢ + εˢ under the root, and its
s-th root: shorter vectors keep their length more exactly, and longer ones are bounded alike.

`set_knee` multiplies each gain by the ratio of the new divisor of a vector with mean |x|ᵖ = P to the old one, so that
this vector keeps its length.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_qknorm.model.attention import QKNormAttention, head_norms, norm_copies, patched_layers, require_patched
from hf_qknorm.model.config_checks import config_file
from hf_qknorm.model.fsdp import reshard
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.ops.norms import NORMS

NO_NORM: Final = 2.0**30  # from this knee on, a norm differs from a constant factor by less than a rounding in fp32

WRAPPERS: Final = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")

Powers = Mapping[tuple[str, str], float]  # the mean |x|ᵖ of a norm's inputs, by the names of its layer and of the norm


def apply_knee(model: Any, knee: float, powers: Powers | None = None, sharpness: int | None = None) -> None:
    """Set the knee of a patched model's norms, in place, and record it in layers and config. Gains don't change.

    Without `powers` each norm keeps its own mean, as does each of PEFT's copies of it: an adapter's file has ε. The
    sharpness stays as it is if it is None.

    Raises ValueError, before anything changes, for a knee that the scheme can't have, and a power that is negative or
    not finite.
    """
    layers = patched_layers(model)
    schemes = {
        name: dataclasses.replace(layer.scheme, knee=knee, sharpness=sharpness or layer.scheme.sharpness)
        for name, layer in layers.items()
    }
    powers = defaultdict(float) if not knee else powers  # plain norms need none
    norms = [
        (norm, norm.mean_power() if powers is None else powers[name, norm_name], schemes[name].sharpness)
        for name, layer in layers.items()
        for norm_name, copies in norm_copies(layer).items()
        for norm in copies
    ]
    for norm, power, _ in norms if knee else ():
        norm.eps_of(knee, power)
    for name, layer in layers.items():
        config: Any = layer.config
        config.set_scheme(schemes[name])
        layer.scheme = schemes[name]
    for norm, power, sharp in norms:
        norm.scheme_sharpness = sharp
        norm.set_knee(knee, power)
    record_powers(model)


def record_powers(model: Any) -> None:
    """Write the mean |x|ᵖ behind each norm's knee into the configs of a patched model's layers, None without a knee."""
    layers = patched_layers(model)
    held = [getattr(model, "config", None), *(layer.config for layer in layers.values())]
    for config in {id(config): config for config in held}.values():
        alike = (item for item in layers.items() if type(item[1].config) is type(config))
        own = {_clean(name): head_norms(layer) for name, layer in alike}
        powers = {name: {n: norm.mean_power() for n, norm in norms.items() if norm.knee} for name, norms in own.items()}
        if own:
            config.qk_norm_powers = powers if any(powers.values()) else None


def _clean(name: str) -> str:
    """A layer's name without the parts that activation checkpointing, FSDP 1, DDP and torch.compile add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS).removeprefix("module.")


def restore_powers(model: Any) -> None:
    """Set the norms of a model that was built from its config to the mean |x|ᵖ in it.

    Without it, on the meta device, ε is NaN until the weights of an older checkpoint bring it. Raises ValueError for a
    norm with a knee whose power is missing.
    """
    for name, layer in patched_layers(model).items():
        config: Any = layer.config
        for norm_name, norm in head_norms(layer).items() if layer.scheme.knee else ():
            if config.qk_norm_powers is not None:
                norm.set_knee(norm.knee, power_of(config, name, norm_name))
            elif norm.weight is not None and norm.weight.is_meta and isinstance(norm.eps, Tensor):
                norm.eps.fill_(math.nan)


def power_of(config: Any, layer: str, norm: str) -> float:
    """The mean |x|ᵖ that a config has for a norm of a layer. Raises ValueError if it has none.

    The layer's name may have another prefix than in the model that was measured, as in a model without its head.
    """
    powers: Any = config.qk_norm_powers or {}
    similar = [key for key in powers if key.endswith(f".{layer}") or layer.endswith(f".{key}")]
    found = powers.get(layer) or (powers[similar[0]] if len(similar) == 1 else {})
    if norm not in found:
        raise ValueError(
            f"{config_file(config)}: qk_norm_powers lacks {norm} of {layer}, whose knee needs the mean of its inputs. "
            "Restore the config.json that was saved with the weights"
        )
    return float(found[norm])


@torch.no_grad()
def set_knee(model: nn.Module, knee: float) -> None:
    """Set the knee of a patched and calibrated model, in place, between two steps of training.

    Gains are rescaled so that a vector of the calibration's mean length keeps its length. Where the keys have no gain
    (gain="scalar"), the queries' gain takes the keys' factor. A knee of 0 is final: the calibration's means are removed
    from the model and later checkpoints. A knee of ∞ is stored as 2³⁰: the norms then multiply by a constant, and
    `remove_norms` can fold them away.

    The optimizer must step the model's own weights: copies such as DeepSpeed's would overwrite the gains. PEFT's copies
    of a norm are changed too; an adapter's file does not hold the knee, so merge the adapter and save the whole model.

        >>> _ = qk.calibrate(qk.patch_model(model, "qk_norm"), texts, knee=4.0)
        >>> qk.set_knee(model, 2.0)
        >>> model.config.scheme.knee
        2.0

    Raises ValueError, with the model unchanged, for a model that is not patched, has no knee, or has no gains
    (gain="none"), for gains that are offloaded, sharded by ZeRO-3 or flattened by FSDP 1, for gains in float16 that
    would overflow, and for an invalid knee.
    """
    layers, knee = require_patched(model), min(knee, NO_NORM)
    if knee == knee_of(model):
        return
    reshard(model)
    check_gains(layers)
    dataclasses.replace(next(iter(layers.values())).scheme, knee=knee)  # raises for an invalid knee
    scaled = gain_factors(model, partial(_factor, knee=knee))
    _check_range(scaled)
    apply_knee(model, knee)
    for norm, factor in scaled:
        scale_gain(norm, factor)


def gain_factors(model: nn.Module, factor: Callable[[HeadNorm], float]) -> list[tuple[HeadNorm, float]]:
    """The norms with gains, and the factors on these; queries take the factor of keys without a gain too."""
    found = []
    for layer in patched_layers(model).values():
        copies = norm_copies(layer)
        keys = math.prod(factor(norm) for norm in copies.get("k_norm", ()) if norm.weight is None)
        for name, norms in copies.items():
            others = keys if name == "q_norm" else 1.0
            found += [(norm, factor(norm) * others) for norm in norms if norm.weight is not None]
    return found


def knee_of(model: nn.Module) -> float:
    """The knee of a patched model; 0 for the plain scheme. Raises ValueError for a model that is not patched."""
    return next(iter(require_patched(model).values())).scheme.knee


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
    apply_knee(model, knee)


def centred_and_size(norm: HeadNorm, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm's inputs x `[..., D]` (if centred x − mean x) and their mean |x|ᵖ `[...]`; fp32 at least."""
    x = x if x.dtype == torch.float64 else x.float()
    y = x - x.mean(-1, keepdim=True) if NORMS[norm.norm].centred else x
    return y, (y * y).mean(-1) if norm.order == 2 else y.abs().pow(norm.order).mean(-1)


def beyond_knee(norm: HeadNorm, x: Tensor) -> Tensor:
    """Return which heads of x `[..., H, D]` are longer than the norm's knee, mean |x|ᵖ > ε^(p/2), as bool `[..., H]`.

    The norm keeps the direction of such a vector rather than its length.
    """
    _, size = centred_and_size(norm, x)
    return size > torch.as_tensor(norm.eps, dtype=size.dtype, device=size.device).pow(norm.order / 2)


def check_gains(layers: dict[str, QKNormAttention]) -> None:
    """Raise ValueError for norms without a knee, or without gains that can be rescaled here."""
    for name, layer in layers.items():
        if not layer.scheme.knee:
            raise ValueError(
                "this model has no knee to change, and no calibration that measured its vectors: "
                "calibrate(model, data, knee=...) sets one, and start_removal(model, data) prepares norms for removal"
            )
        if layer.scheme.gain == "none":
            raise ValueError(
                'gain="none": the norms have no gains to compensate another knee. Calibrate with the knee that you '
                'want, or patch with gain="shared"'
            )
        for weight in (norm.weight for norm in chain(*norm_copies(layer).values()) if norm.weight is not None):
            # ZeRO-3 sets ds_id on parameters; FSDP 1 replaces parameters by views that are none
            if weight.is_meta or hasattr(weight, "ds_id") or not isinstance(weight, nn.Parameter):
                raise ValueError(
                    f"the gains of {name} cannot be rescaled (offloaded, or sharded by ZeRO-3 or FSDP 1): set "
                    "the knee before that, or shard by FSDP 2 or with use_orig_params=True"
                )


def _check_range(scaled: list[tuple[HeadNorm, float]]) -> None:
    """Raise ValueError for gains in float16 that their factors would make infinite."""
    for norm, factor in scaled:
        weight: Any = norm.weight
        if weight.dtype != torch.float16 or not weight.numel():
            continue
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight  # a rank's shard may be empty
        if float(whole.abs().max()) * factor > torch.finfo(torch.float16).max:
            raise ValueError(
                f"a gain in float16 would be multiplied by {factor:.4g}, beyond its range: train in float32 or bfloat16"
            )


def _factor(norm: HeadNorm, knee: float) -> float:
    """The factor on a gain that keeps the length of a vector of the calibration's mean |x|ᵖ at another knee."""
    power = norm.mean_power()
    return norm.keeping_gain(knee, power) / norm.keeping_gain(norm.knee, power)


@torch.no_grad()
def scale_gain(norm: HeadNorm, factor: float) -> None:
    """Multiply the norm's gain; while there is a knee, the buffer `rest` holds the product's rounding error in 16 bits.

    Without it, the errors of many small steps would add up to several units in the last place. It is of no use to
    gains that were loaded or calibrated since: these are not their sum with it, rounded.
    """
    weight, rest = norm.weight, norm._buffers.pop("rest", None)
    assert weight is not None
    if weight.dtype.itemsize > 2:
        weight.mul_(factor)
        return
    exact = weight.float()
    if rest is not None:
        exact = torch.where((exact + rest).to(weight.dtype) == weight, exact + rest, exact)
    exact = exact * factor
    weight.copy_(exact)
    if norm.knee:
        norm.register_buffer("rest", exact - weight.float(), persistent=False)
