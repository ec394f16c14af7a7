"""The options, models and batches that `calibrate` refuses, and its defaults."""

from __future__ import annotations

import math
from typing import Any, Literal

from hf_qknorm.calibration.gains import named_norms
from hf_qknorm.calibration.knees import EXPORT_KNEE, SHARPNESS
from hf_qknorm.files.formatting import shorten
from hf_qknorm.measure.batches import Batches, is_bidirectional
from hf_qknorm.measure.predictions import require_causal
from hf_qknorm.measure.text import INPUTS
from hf_qknorm.model.adapters import is_adapter_layer
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.derived import QKNormModel
from hf_qknorm.model.fold import is_exact
from hf_qknorm.model.install import require_base
from hf_qknorm.scheme import Scheme

Knee = float | Literal["auto"]


def resolve_knee(scheme: Scheme, knee: Knee | None, max_loss_increase: float | None, exportable: bool) -> Knee:
    """The knee of a calibration, with the default in place of None.

    Raises ValueError for a knee that the scheme can't have, and a limit that is not finite.
    """
    if max_loss_increase is not None and not math.isfinite(max_loss_increase):
        raise ValueError(f"max_loss_increase={max_loss_increase} is no limit: expected a finite number, or None")
    if knee is not None and knee != "auto" and (isinstance(knee, str) or not 0 <= knee < math.inf):
        raise ValueError(f'knee={shorten(knee)}: expected a number ≥ 0, "auto", or None')
    if exportable:
        knee = EXPORT_KNEE if knee is None else knee
        if isinstance(knee, str) or not knee:
            raise ValueError(f"knee={knee} is not exportable: expected a number above 0, as knee={EXPORT_KNEE:g}")
    possible = bool(scheme.norms) and scheme.pre_norm
    if knee is None:
        return "auto" if possible and scheme.gain != "none" else 0.0
    if knee and not possible:
        raise ValueError(
            f"knee={knee}: expected 0 unless q, k or v is normed and pre_norm is True: a norm with a knee keeps part "
            "of the scale"
        )
    return knee


def resolve_sharpness(sharpness: float | None, knee: Knee, exportable: bool) -> float:
    """The sharpness of a calibration, by default by its knee. Raises ValueError for one that is not possible."""
    if sharpness is None:
        return float(SHARPNESS if isinstance(knee, str) else 1)
    if not 1 <= sharpness < math.inf or (exportable and sharpness != 1):
        raise ValueError(f"sharpness={sharpness}: expected {'1 with exportable' if exportable else 'a number ≥ 1'}")
    return float(sharpness)


def scheme_of(model: Any) -> Scheme:
    """The scheme of a patched model. Raises ValueError for another model, and names a patched tower in it."""
    if not isinstance(model, QKNormModel):
        towers = [name for name, module in model.named_modules() if isinstance(module, QKNormModel)]
        if towers:
            raise ValueError(
                f"of {type(model).__name__} only a tower is patched, {towers[0]}: calibrate the tower, as "
                f"calibrate(model.{towers[0]}, data)"
            )
        raise ValueError(f"{type(model).__name__} is not patched with a scheme: call patch_model(model, scheme) first")
    return model.config.scheme


def check_inputs(model: Any, batches: Batches) -> None:
    """Raise ValueError for batches without the model's input, or without labels that a masked language model needs."""
    if missing := next((batch for batch in batches if model.main_input_name not in batch), None):
        raise ValueError(
            f'{type(model).__name__} takes "{model.main_input_name}", and a batch has {", ".join(missing)}: give '
            "mappings with it"
        )
    predicts_masked = is_bidirectional(model.config) and model.get_output_embeddings() is not None
    if predicts_masked and not all("labels" in batch for batch in batches):
        raise ValueError(
            f"{type(model).__name__} has bidirectional attention and predicts masked tokens: give batches with "
            '"input_ids", some of them masked, and "labels", as DataCollatorForLanguageModeling makes them'
        )


def check_supported(model: Any, limit: float | None) -> None:
    """Raise ValueError for a model that can't be calibrated, or judged by this limit."""
    if model.main_input_name not in INPUTS or model.config.is_encoder_decoder:
        require_causal(model.config)
    require_base(model)
    for (layer, name), norm in named_norms(model).items():
        if any(p.is_meta for p in norm.parameters()):
            raise ValueError(
                f"the gains of {layer}.{name} are offloaded, where new values are lost: load the model into memory, or "
                "calibrate the original checkpoint while it is converted (convert_checkpoint with max_memory)"
            )
    layers = [] if model.config.scheme.pre_norm or is_exact(model) else patched_layers(model).values()
    if any(is_adapter_layer(layer.get_submodule(part)) for layer in layers for part in layer.family.style.weights):
        raise ValueError(
            "a scheme with pre_norm=False scales projections, and some are under adapters, which do not save them: "
            "calibrate before you add adapters"
        )
    if limit is not None and model.get_output_embeddings() is None:
        raise ValueError(
            f"{type(model).__name__} predicts no tokens, which max_loss_increase={limit:g} compares: leave it out, or "
            "calibrate the language model"
        )
