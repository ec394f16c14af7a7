"""The models and batches that `calibrate` refuses."""

from __future__ import annotations

from typing import Any

from hf_qknorm.calibration.gains import named_norms
from hf_qknorm.measure.batches import Batches, is_bidirectional
from hf_qknorm.measure.predictions import require_causal
from hf_qknorm.measure.text import INPUTS
from hf_qknorm.model.adapters import is_adapter_layer
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.derived import QKNormModel
from hf_qknorm.model.fold import is_exact
from hf_qknorm.model.install import require_base
from hf_qknorm.scheme import Scheme


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


def predicts_masked(model: Any) -> bool:
    """Whether a model predicts masked tokens, which its batches label."""
    return is_bidirectional(model.config) and model.get_output_embeddings() is not None


def check_inputs(model: Any, batches: Batches) -> None:
    """Raise ValueError for batches without the model's input, or without labels that a masked language model needs."""
    if missing := next((batch for batch in batches if model.main_input_name not in batch), None):
        raise ValueError(
            f'{type(model).__name__} takes "{model.main_input_name}", and a batch has {", ".join(missing)}: give '
            "mappings with it"
        )
    if predicts_masked(model) and not all("labels" in batch for batch in batches):
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
    if not model.config.scheme.pre_norm and not is_exact(model):
        _check_scalable(model)
    if limit is not None and model.get_output_embeddings() is None:
        raise ValueError(
            f"{type(model).__name__} predicts no tokens, which max_loss_increase={limit:g} compares: leave it out, or "
            "calibrate the language model"
        )


def _check_scalable(model: Any) -> None:
    """Raise ValueError if the projections that norms were folded into are under adapters."""
    layers = patched_layers(model).values()
    if any(is_adapter_layer(layer.get_submodule(part)) for layer in layers for part in layer.family.style.weights):
        raise ValueError(
            "a scheme with pre_norm=False scales projections, and some are under adapters, which do not save them: "
            "calibrate before you add adapters"
        )
