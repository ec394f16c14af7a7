"""`export_native`: a patched checkpoint as one of transformers' own models, if one computes exactly the same."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_qknorm.checkpoint import copy_files, load_model, open_source, quiet_transformers
from hf_qknorm.convert.mtp import state_with_mtp
from hf_qknorm.families.counterparts import counterpart, settings
from hf_qknorm.files.atomic_io import new_folder
from hf_qknorm.files.paths import check_folder, user_path
from hf_qknorm.model.attention import QKNormAttention, every_norm, head_norms, patched_layers
from hf_qknorm.model.configs import QKNormConfig
from hf_qknorm.model.knees import knee_of
from hf_qknorm.model.placement import check_finite
from hf_qknorm.model.record import own_tensors
from hf_qknorm.training.removal import remove_norms


@dataclass(frozen=True)
class NativeExport:
    """The result of `export_native`: both folders, and the class that transformers loads.

    `scaled`: projections of queries and keys are scaled for a knee.
    """

    source: Path
    destination: Path
    architecture: str
    scaled: bool = False

    def __str__(self) -> str:
        text = f"{self.source} → {self.destination}: {self.architecture}, which transformers loads without hf_qknorm"
        caution = "\nserve it, do not train it with Adam, whose steps are too large for the projections of its knee"
        return text + caution * self.scaled


def export_native(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    data: Any = None,
    max_loss_increase: float | None = None,
    max_tokens: int = 16_384,
    length: int | None = None,
    overwrite: bool = False,
) -> NativeExport:
    """Export the patched checkpoint in the folder `src` to the new folder `dst` as one of transformers' own models.

    RMS norms on q and k of a Llama, Mistral or Qwen 2 give a Qwen 3, of a Mixtral a Qwen 3 MoE. Norms that training has
    removed (`KneeSchedule(target=math.inf)`) are folded into their projections: what remains is the model that was
    patched. Computed in float32, logits are equal to the bit, or up to rounding if tensors are scaled.
    The model is loaded into memory; tokenizer, generation config and licence are copied.

    With `data` (texts or batches, as for `calibrate`) norms that still act are removed too, by `remove_norms`, which is
    not exact: the loss on up to `max_tokens` tokens, in sequences of `length`, is logged before and after. It must not
    rise by more than `max_loss_increase` nats per token; None means no limit.

    Raises ValueError, with the reason and a remedy, if no model of transformers computes the same, and for a rise above
    the limit; FileExistsError if `dst` exists (with `overwrite`: and holds anything but a checkpoint) or holds `src`;
    FileNotFoundError or ValueError if `src` is not a complete patched checkpoint. After an error nothing is written.

    >>> qk.patch_model(model, "qk_norm").save_pretrained("patched")
    >>> print(qk.export_native("patched", "exported"))
    patched → exported: Qwen3ForCausalLM, which transformers loads without hf_qknorm
    """
    for name, value in {"max_loss_increase": max_loss_increase, "length": length}.items():
        if data is None and value is not None:
            raise ValueError(f"{name} is for a measurement, on text: pass data= (--data TEXT) as well")
    folder, destination = user_path(src, "src"), user_path(dst, "dst")
    check = partial(check_folder, destination, overwrite=overwrite, sources=[folder, data])
    check()
    source = open_source(folder)
    if not isinstance(source.config, QKNormConfig):
        raise ValueError(f"{folder} is a plain {source.config.model_type}, not a patched model: nothing to export")
    if source.model is None:
        raise ValueError(f"{folder} is quantised: export the checkpoint in full precision, then quantise the result")
    subject = f"{folder} ({source.config.base_model_type}, {source.config.scheme})"
    if (cap := source.config.scheme.softcap) is not None:
        raise ValueError(
            f"{subject} is not exported: the cap of {cap:g} would be lost. In Python, remove_norms takes the norms "
            "off, and unpatch_model the cap: save the result"
        )
    model = load_model(source)
    check_finite(model, folder)
    scaled = False
    try:
        if data is not None:
            remove_norms(model, data, max_loss_increase=max_loss_increase, max_tokens=max_tokens, length=length)
        elif source.config.scheme.norms and knee_of(model) == math.inf:
            if model.dtype.itemsize < 4:
                raise ValueError(
                    f"it would not be exact in {model.dtype}: the constant factors of its norms would be folded into "
                    f"the projections, and rounded. {WIDER}, or measure the cost with data (--data TEXT)"
                )
            remove_norms(model)
        else:
            model, scaled = _as_qwen3(model)
    except ValueError as error:
        raise ValueError(f"{subject} is not exported: {error}") from error
    with new_folder(destination, check) as out:
        with quiet_transformers():
            model.save_pretrained(out, state_dict=state_with_mtp(model, folder))
        copy_files(source, out, card=False)  # the card is of the old model
    return NativeExport(folder, destination, type(model).__name__, scaled)


def _as_qwen3(model: Any) -> tuple[Any, bool]:
    """The Qwen 3 that computes the same as a patched model, and whether projections were scaled for a knee."""
    config = model.config
    target = CONFIG_MAPPING[counterpart(config)]
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[target.model_type]
    known = target().to_dict().keys() - {"model_type", "architectures"}
    shared = {key: value for key, value in config.to_dict().items() if key in known}
    tensors = own_tensors(model)
    for name, layer in patched_layers(model).items():
        _fold_layer(tensors, name, layer, config)
    options = {"config": target(**shared | settings(config)), "state_dict": tensors, "dtype": model.dtype}
    with quiet_transformers():
        native, info = getattr(transformers, architecture).from_pretrained(None, output_loading_info=True, **options)
    if found := sorted({*info["unexpected_keys"], *info["missing_keys"]}):
        raise ValueError(f"{', '.join(found[:3])} would be lost or missing: a {architecture} has other tensors")
    return native, any(norm.shape.epsilon for norm in every_norm(model))


def _fold_layer(tensors: dict[str, Tensor], name: str, layer: QKNormAttention, config: Any) -> None:
    """Change a layer's tensors to those of a Qwen 3, whose norms all have the model's eps.

    The norm in front of attention takes a power of two of the projections' scale: K-quants have too few exponents for
    projections as small as a knee makes them. It takes 5/8 of the exponent: with half, a small Llama's Q6_K is 1.3
    times as far off as its original's, and more would leave little of float16's range to the norm.
    """
    norms, own = head_norms(layer), float(config.rms_norm_eps)
    for norm in norms.values():
        if norm.shape.epsilon and norm.shape.sharpness > 1:
            raise ValueError(
                f"the sharpness of {norm.shape.sharpness:g} would be lost: a Qwen 3's norms have RMSNorm's own form. "
                "Convert with a fixed knee (--knee 16), which leaves the sharpness at 1; or take the norms off "
                "(hf-qknorm export --data measures the cost), or lower the knee to 0 in training (KneeSchedule)"
            )
    factors = {part[0]: math.sqrt(own / norm.epsilon) for part, norm in norms.items()} | {"v": 1.0}
    share = 2.0 ** round(math.log2(math.prod(factors.values())) / 2 * 5 / 8)
    hint = f"calibrate with exportable=True (--exportable), or convert with Scheme(..., eps={own:g})"
    _scale(tensors, f"{name.rpartition('.')[0]}.input_layernorm.weight", share, hint)
    for side, factor in factors.items():
        _scale(tensors, f"{name}.{side}_proj.weight", factor / share, hint)
        if f"{name}.{side}_proj.bias" in tensors:
            _scale(tensors, f"{name}.{side}_proj.bias", factor, hint)
            tensors.setdefault(f"{name}.o_proj.bias", tensors[f"{name}.o_proj.weight"].new_zeros(config.hidden_size))
    # The lengths of plain norms scale the queries' gains, with the scale: their product may be a power of two.
    plain = math.prod(norm.length() for norm in norms.values() if not norm.shape.power)
    for part, norm in norms.items():
        ones = torch.ones(norm.head_dim, dtype=tensors[f"{name}.q_proj.weight"].dtype)
        tensors[f"{name}.{part}.weight"] = ones if norm.weight is None else norm.weight * ones
        factor = norm.length() if norm.shape.power else 1.0
        factor *= plain * layer.logit_scale / layer.own_scale if part == "q_norm" else 1.0
        _scale(tensors, f"{name}.{part}.weight", factor, "calibrate with exportable=True (--exportable)")
        tensors.pop(f"{name}.{part}.knee")


def _scale(tensors: dict[str, Tensor], name: str, factor: float, hint: str) -> None:
    """Multiply a tensor. Raises ValueError if a number is rounded in 16 bits, or leaves the range of its dtype."""
    tensor = tensors[name].detach()
    exact = tensor.double() * factor
    scaled = exact.to(tensor.dtype)
    if tensor.dtype.itemsize < 4 and not torch.equal(scaled.double(), exact):
        raise ValueError(
            f"it would not be exact in {tensor.dtype}: {name} would be multiplied by {factor:.4g}, and rounded. "
            f"{WIDER}, or {hint}"
        )
    if not (scaled.isfinite().all() and torch.equal(scaled == 0, tensor == 0)):
        raise ValueError(f"{name} would be multiplied by {factor:.4g}, beyond the range of {tensor.dtype}: {hint}")
    tensors[name] = scaled


WIDER = "Save the checkpoint in float32 (model.float().save_pretrained(...)) and export that"
