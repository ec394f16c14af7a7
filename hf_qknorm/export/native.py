"""`export_native`: a patched checkpoint as one of transformers' own models, if one computes exactly the same."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_qknorm.checkpoint import copy_files, load_model, open_source, quiet_transformers
from hf_qknorm.export.constant_norms import fold_constant_norms
from hf_qknorm.export.targets import Target, find_target
from hf_qknorm.export.tensor_plan import TensorPlan
from hf_qknorm.families.class_names import PREFIX
from hf_qknorm.files.atomic_io import new_folder
from hf_qknorm.files.destinations import check_folder
from hf_qknorm.files.names import CONFIG
from hf_qknorm.files.paths import user_path
from hf_qknorm.model.attention import every_norm
from hf_qknorm.model.config_checks import config_errors
from hf_qknorm.model.configs import OWN_SETTINGS, QKNormConfig
from hf_qknorm.model.knees import knee_of
from hf_qknorm.model.placement import check_finite
from hf_qknorm.model.record import own_tensors
from hf_qknorm.standalone.notice import NOTICES


@dataclass(frozen=True)
class NativeExport:
    """The result of `export_native`: both folders, and the model type and class that transformers loads.

    >>> qk.patch_model(model, "soft_cap").save_pretrained("patched")
    >>> print(qk.export_native("patched", "exported"))
    patched → exported: VaultGemmaForCausalLM, which transformers loads without hf_qknorm
    """

    source: Path
    destination: Path
    model_type: str
    architecture: str
    scaled: bool = False  # projections of queries and keys, for a knee

    def __str__(self) -> str:
        text = f"{self.source} → {self.destination}: {self.architecture}, which transformers loads without hf_qknorm"
        warning = "serve it, do not train it with Adam, whose steps are too large for the projections of its knee"
        return f"{text}\n{warning}" if self.scaled else text


def export_native(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    end_norms: bool = False,
    check_result: Callable[[Path], None] = lambda folder: None,
) -> NativeExport:
    """Export the patched checkpoint in the folder `src` to the new folder `dst` as one of transformers' own models.

    RMS norms on q and k of a Llama, Mistral, Phi-3 or Qwen 2 give a Qwen 3, of a Mixtral a Qwen 3 MoE; LayerNorms of a
    GPT-NeoX give a Phi; a cap without norms gives a VaultGemma, or of a Gemma 2 another Gemma 2; the scheme "none"
    gives the model that was patched. Norms that training has removed (`KneeSchedule(target=math.inf)`) are folded into
    their projections: what remains is exported as a model without norms. Computed in float32, logits are equal to the
    bit, or up to rounding if tensors are scaled.
    The model is loaded into memory; tokenizer, generation config and licence are copied.

    With `end_norms`, norms that still act are replaced by constant factors too, which is no longer exact: sharp norms
    that bound few vectors cost little (`convert.remeasure` measures it). `check_result` is called with the
    finished folder before it is put in place, and may raise.

    Raises ValueError, with the reason and a remedy, if no model of transformers computes the same; FileExistsError if
    `dst` exists (with `overwrite`: and holds anything but a checkpoint) or holds `src`; FileNotFoundError or ValueError
    if `src` is not a complete patched checkpoint. After an error nothing is written.

    >>> qk.patch_model(model, qk.Scheme(softcap=50.0)).save_pretrained("capped")
    >>> qk.export_native("capped", "vaultgemma").architecture
    'VaultGemmaForCausalLM'
    """
    folder, destination = user_path(src, "src"), user_path(dst, "dst")
    check = partial(check_folder, destination, overwrite=overwrite, sources=[folder])
    check()
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} holds no config.json: give the folder of a patched checkpoint")
    source = open_source(folder)
    check_exportable(folder, source.config)
    model = load_model(source)
    check_finite(model, folder)
    try:
        plan, config = plan_export(model, end_norms=end_norms)
        native = _native_model(plan, config)
    except ValueError as error:
        subject = f"{folder} ({source.config.base_model_type}, {source.config.scheme})"
        raise ValueError(f"{subject} is not exported: {error}") from error
    with new_folder(destination, check) as out:
        with quiet_transformers():
            native.save_pretrained(out)
        (out / CONFIG).write_text(_json(native.config), encoding="utf-8")
        copy_files(source, out, card=False)  # the card is of the old model
        check_result(out)
    scaled = not end_norms and any(norm.shape.epsilon and norm.ratio < math.inf for norm in every_norm(model))
    return NativeExport(folder, destination, config.model_type, config.architectures[0], scaled)


def plan_export(model: Any, *, end_norms: bool = False) -> tuple[TensorPlan, Any]:
    """Plan the export of a patched model: return the tensors and the config.

    Raises ValueError if there is no target, and names the parts that would be lost.
    """
    plan, patched = TensorPlan(own_tensors(model)), model.config
    if patched.scheme.norms and (end_norms or knee_of(model) == math.inf):
        patched = fold_constant_norms(plan, model, end=end_norms)
    target = find_target(patched)
    with config_errors(CONFIG, patched.model_type, patched.architectures):
        for transform in target.transforms:
            transform(plan, patched)
        config = _target_config(patched, target)
    if not end_norms:  # else a rounding is in the loss that is measured
        plan.check_halves()
    return plan, config


def _native_model(plan: TensorPlan, config: Any) -> Any:
    """Load the tensors of the plan into the target's class. Raises ValueError for any that do not fit."""
    model_class = getattr(transformers, config.architectures[0])
    options = {"config": config, "state_dict": plan.tensors(), "dtype": config.dtype, "output_loading_info": True}
    with quiet_transformers():
        native, info = model_class.from_pretrained(None, **options)
    for keys, problem in (("unexpected_keys", "would be lost"), ("missing_keys", "would be missing")):
        if found := sorted(info[keys]):
            raise ValueError(f"{', '.join(found[:3])} {problem}: a {model_class.__name__} has other tensors")
    return native


def check_exportable(folder: Path, config: Any) -> None:
    """Raise ValueError for a config that is not patched, or quantised."""
    if not isinstance(config, QKNormConfig):
        raise ValueError(f"{folder} is a plain {config.model_type}, not a patched model: there is nothing to export")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{folder} is quantised: export the checkpoint in full precision, then quantise the result")


def _target_config(config: Any, target: Target) -> Any:
    """Return the target's config: the settings that it shares with the source's, and its own."""
    settings = config.to_dict()
    own = (name for name in OWN_SETTINGS if name.startswith("qk_norm"))
    for key in (*own, "auto_map", "model_type", "architectures", *NOTICES):
        settings.pop(key, None)
    target_class = CONFIG_MAPPING[target.model_type]
    base = config.base_model_type
    architectures = [name.removeprefix(PREFIX) for name in config.architectures or ()]
    if target.model_type == base:
        if not target.cap:
            settings.pop("attn_logit_softcapping", None)
    else:
        if architectures != [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[base]]:
            raise ValueError(
                f"a {base} can become a {target.model_type} as a causal language model only, got "
                f"{', '.join(architectures) or 'no architecture'} in config.json"
            )
        architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[target.model_type]]
        known = target_class().to_dict()
        settings = {key: value for key, value in settings.items() if key in known}
    return target_class(**(settings | target.settings(config)), architectures=architectures)


def _json(config: PretrainedConfig) -> str:
    settings = json.loads(config.to_json_string())
    if getattr(config, "attn_logit_softcapping", None) is not None:
        settings["attn_implementation"] = "eager"  # older transformers (5.17) ignore the cap by default
    return json.dumps(settings, indent=2, sort_keys=True) + "\n"
