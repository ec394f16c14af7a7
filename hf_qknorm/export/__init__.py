"""`export_native`: a patched checkpoint as one of transformers' own models, where that computes exactly the same."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_qknorm.checkpoint.complete import check_complete
from hf_qknorm.checkpoint.config import check_readable
from hf_qknorm.checkpoint.copied_files import copy_file
from hf_qknorm.checkpoint.destinations import check_folder
from hf_qknorm.checkpoint.source import Source, open_source
from hf_qknorm.export.targets import Target, find_target
from hf_qknorm.export.tensor_plan import Draft
from hf_qknorm.families.class_names import PREFIX
from hf_qknorm.files.atomic_io import new_folder
from hf_qknorm.files.names import CARD, CONFIG
from hf_qknorm.files.paths import user_path
from hf_qknorm.model.configs import QKNormConfig
from hf_qknorm.model.settings import config_errors
from hf_qknorm.standalone.notice import NOTICES


@dataclass(frozen=True)
class NativeExport:
    """What `export_native` did: from which folder to which, and the model type and class that transformers loads."""

    source: Path
    destination: Path
    model_type: str
    architecture: str

    def __str__(self) -> str:
        return f"{self.source} → {self.destination}: {self.architecture}, which transformers loads without hf_qknorm"


def export_native(src: str | os.PathLike[str], dst: str | os.PathLike[str], *, overwrite: bool = False) -> NativeExport:
    """Write the patched checkpoint in the folder `src` into the new folder `dst` as a model of transformers' own.

    RMS norms on q and k of a Llama, Mistral, Phi-3 or Qwen 2 give a Qwen 3, of a Mixtral a Qwen 3 MoE; LayerNorms of a
    GPT-NeoX a Phi; a cap without norms a VaultGemma, or another Gemma 2 from a Gemma 2; the scheme "none" the model
    that was patched. Tensors keep their dtypes and are never all in memory; tokenizer, generation config and licence
    go along. Where tensors must be scaled on the way, the logits are equal up to rounding in float32, else to the bit.

    Raises ValueError, saying what would be lost and what to do, where no model of transformers computes the same;
    FileExistsError where `dst` is there (with `overwrite`: holds anything but a checkpoint) or holds `src`,
    FileNotFoundError and ValueError for a `src` that is no whole patched checkpoint. Then nothing is written.
    """
    folder, destination = user_path(src, "src"), user_path(dst, "dst")
    check = partial(check_folder, destination, overwrite=overwrite, sources=[folder])
    check()
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json: give the folder of a patched checkpoint")
    with open_source(folder) as source:
        _check_config(folder, source.config)
        unused = source.check_complete()
        source.check_gains()
        try:
            target = find_target(source.config)
            with config_errors(str(folder / CONFIG), source.config.model_type, source.config.architectures):
                draft, plain = _planned(source, target)
            _check_planned(draft, plain, unused)
        except ValueError as error:
            what = f"{folder} ({source.config.base_model_type}, {source.config.scheme})"
            raise ValueError(f"{what} is not exported: {error}") from error
        with new_folder(destination, check) as out:
            (out / "config.json").write_text(_json(plain), encoding="utf-8")
            for file in source.files:
                # the card and the stand-alone code tell of a model that this one no longer is
                if file.name != CARD and file.suffix != ".py":
                    copy_file(folder, file, out)
            check_readable(out, folder)
            draft.write(out)
            source.check_unchanged()
    return NativeExport(folder, destination, target.model_type, plain.architectures[0])


def _check_config(folder: Path, config: Any) -> None:
    if not isinstance(config, QKNormConfig):
        raise ValueError(f"{folder} is a plain {config.model_type}, not a patched model: there is nothing to export")
    if config.qk_norm_blend is not None:
        raise ValueError(f"{folder} was saved while its scheme was on its way in (a blend): train to the end of that")
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{folder} is quantised: export the checkpoint in full precision, then quantise what comes out"
        )


def _planned(source: Source, target: Target) -> tuple[Draft, PretrainedConfig]:
    """The tensors as they will be, and the config."""
    draft = Draft(source.weights)
    for step in target.steps:
        step(draft, source.config, source.config.scheme)
    return draft, _plain_config(source.config, target)


def _check_planned(draft: Draft, plain: Any, unused: tuple[str, ...]) -> None:
    """Raise ValueError unless the target finds all that it asks for, and reads all that the patched model reads."""
    tensors = draft.tensors()
    model_class = getattr(transformers, plain.architectures[0])
    lost = [name for name in check_complete(model_class, plain, tensors, draft.weights.folder) if name not in unused]
    if lost:
        raise ValueError(f"{', '.join(lost)} would be lost: a {model_class.__name__} does not read it")


def _plain_config(config: Any, target: Target) -> PretrainedConfig:
    """The target's config: what it has in common with the source's, and its own settings."""
    said = json.loads(config.to_json_string(use_diff=False))
    for key in ("qk_norm", "qk_norm_base", "qk_norm_blend", "auto_map", "model_type", "architectures", *NOTICES):
        said.pop(key, None)
    target_class = CONFIG_MAPPING[target.model_type]
    base = config.base_model_type
    architectures = [name.removeprefix(PREFIX) for name in config.architectures or ()]
    if target.model_type == base:
        if not target.cap:
            said.pop("attn_logit_softcapping", None)
    else:
        if architectures != [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[base]]:
            raise ValueError(
                f"a {base} goes to {target.model_type} as a causal language model only, got "
                f"{', '.join(architectures) or 'no architecture'} in config.json"
            )
        architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[target.model_type]]
        known = target_class().to_dict()
        said = {key: value for key, value in said.items() if key in known}
    plain: PretrainedConfig = target_class(**(said | target.settings(config)), architectures=architectures)
    return plain


def _json(config: PretrainedConfig) -> str:
    said = json.loads(config.to_json_string())
    if getattr(config, "attn_logit_softcapping", None) is not None:
        said["attn_implementation"] = "eager"  # older transformers (5.17) drop the cap by default
    return json.dumps(said, indent=2, sort_keys=True) + "\n"
