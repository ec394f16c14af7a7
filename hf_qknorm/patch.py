"""`patch_model` and `unpatch_model`: put a scheme on a model in memory, and remove it again."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from hf_qknorm.attend import functions
from hf_qknorm.families import family_of
from hf_qknorm.files.log import logger
from hf_qknorm.model.accelerate_hooks import check_offload
from hf_qknorm.model.adapters import is_adapter_layer
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.config_owners import check_one_config, config_owners, set_config, share_backend, share_config
from hf_qknorm.model.configs import QKNormConfig, check_names, derived_architectures
from hf_qknorm.model.derived import QKNormModel, derived_config, set_model_class, use_derived_classes
from hf_qknorm.model.fold import check_foldable, fold_pre_norms
from hf_qknorm.model.in_memory import InMemoryName, mark_in_memory
from hf_qknorm.model.install import install, require_own_forward, uninstall
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.model.record import drop_record
from hf_qknorm.model.rollback import undone_on_error
from hf_qknorm.model.tensor_parallel import plan_norms, unplan_norms
from hf_qknorm.model.towers import check_saved_tower, pick_tower, towers_of, with_config
from hf_qknorm.model.weights import OPTIMISED, check_not_copied
from hf_qknorm.scheme import Scheme


@torch.inference_mode(False)  # else gains could never train
def patch_model(
    model: PreTrainedModel,
    scheme: Scheme | str | Mapping[str, Any] = "qk_norm_cap",
    *,
    attn_implementation: str | None = None,
    tower: str | None = None,
) -> PreTrainedModel:
    """Put a scheme on every attention layer of `model`, in place, and return the model.

    `scheme` is a preset's name, a `Scheme`, or its JSON form. The model's class and its config's class become derived
    ones, which train, save and load as any transformers model does. With the scheme "none" both stay as they are.

    New gains are 1: a pretrained model loses part of what it knew until `calibrate` fits them. With `pre_norm=False`
    the norm before attention is folded into the projections, which can't be undone.

    `attn_implementation` selects the attention backend. Default: with a cap "hf_qknorm"
    ("eager" if `config.output_attentions` asks for the weights), else the model's own. `tower` names the part of a
    multimodal model to patch, such as "vision_tower". Default: its text tower.

    `model.name_or_path` still names the tokenizer's checkpoint, but `from_pretrained` of a model refuses it, as of TRL
    for a reference model. As a plain string it names the unpatched model.

    Raises TypeError if `model` is no transformers model. Raises ValueError, with the model unchanged, for a model, a
    wrapper or a backend that can't have the scheme, for a scheme or tower that does not exist, and for a patched model.
    Raises ImportError for a backend whose package is not installed.

    >>> model = qk.patch_model(model, scheme="qk_norm_cap")
    >>> type(model).__name__, model.config.scheme.softcap
    ('QKNormLlamaForCausalLM', 50.0)
    """
    scheme = Scheme.of(scheme)
    _require_bare(model)
    picked = pick_tower(model, tower)
    if picked is not None:
        return _patch_tower(model, *picked, scheme, attn_implementation)
    scheme = scheme.resolve()
    family = family_of(model.config, scheme)
    layers = require_own_forward(model, family)
    if not scheme.changes_nothing:
        check_one_config(model, layers)
    if scheme.norms:
        check_offload(model, layers)
    if not scheme.pre_norm:
        check_foldable(model, layers, family)
    if attn_implementation is not None:
        functions.check_mask_function(attn_implementation)
    base_backend = model.config._attn_implementation
    owners = [] if scheme.changes_nothing else config_owners(model)
    configs = [(owner, patched_config(owner.config, scheme)) for owner in owners]
    with undone_on_error(model) as keep:
        share_config(model)
        for owner, config in configs:
            set_config(owner, config)
        if configs:
            use_derived_classes(model)
        install(model, family, scheme)
        plan_norms(model)
        model.qk_norm_base_backend = base_backend
        if attn_implementation is not None or scheme.softcap is not None:
            model.set_attn_implementation(model.get_correct_attn_implementation(attn_implementation))
        _log(model, scheme)
        if not scheme.pre_norm:
            fold_pre_norms(model, keep)
        model.qk_norm_base_marked = isinstance(model.name_or_path, InMemoryName)
        if not scheme.changes_nothing:
            mark_in_memory(model)
    return model


def _patch_tower(
    model: PreTrainedModel, path: str, key: str, scheme: Scheme, attn_implementation: str | None
) -> PreTrainedModel:
    """Patch the tower at `path` of a multimodal model, whose config holds the tower's config under `key`."""
    tower: Any = model.get_submodule(path)
    _require_bare(tower)
    if scheme.changes_nothing:
        patch_model(tower, scheme, attn_implementation=attn_implementation)
        return model
    check_saved_tower(model, path, key, patched_config(tower.config, scheme), family_of(tower.config))
    with undone_on_error(model):
        patch_model(tower, scheme, attn_implementation=attn_implementation)
        set_config(model, with_config(model.config, key, tower.config))
        mark_in_memory(model)
    return model


def unpatch_model(model: PreTrainedModel) -> PreTrainedModel:
    """Remove the scheme from a patched model, in place, and return the model with its own classes.

    The model then computes what its weights give without norms and cap. In a multimodal model every patched tower is
    restored.

    Raises ValueError if the model is not patched, has adapters, or is sharded by FSDP2. Raises it for
    `pre_norm=False` too: the norm before attention is part of the projections, and can't be separated from them after
    training.

    >>> model = qk.patch_model(model, scheme="qk_norm_cap")
    >>> type(qk.unpatch_model(model)).__name__
    'LlamaForCausalLM'
    """
    towers = towers_of(model) if isinstance(model, PreTrainedModel) else {}  # a wrapper is refused below
    if patched := {path: key for path, key in towers.items() if _is_patched(model.get_submodule(path))}:
        with undone_on_error(model):
            for path, key in patched.items():
                tower: Any = unpatch_model(model.get_submodule(path))
                set_config(model, with_config(model.config, key, tower.config))
                mark_in_memory(model, marked=isinstance(tower.config.name_or_path, InMemoryName))
        return model
    layers = patched_layers(model).values()
    if not _is_patched(model):
        inner = "unpatch the model inside, once adapters are merged" if layers else "there is no scheme to remove"
        raise ValueError(f"{type(model).__name__} is not patched: {inner}")
    if any(map(is_adapter_layer, model.modules())):  # their files name the patched model as their base
        raise ValueError("this model has adapters, and they were trained with the scheme: merge and unload them first")
    if "FSDP" in type(model).__name__:  # FSDP2's class would be lost
        raise ValueError(
            f"this model is sharded by FSDP2 ({type(model).__name__}): unpatch a model before it is sharded"
        )
    if not all(layer.scheme.pre_norm for layer in layers):
        raise ValueError(
            "the scheme folded the norm before attention into the projections (pre_norm=False), which can't be undone: "
            "training changes both together. Load the original checkpoint instead"
        )
    with undone_on_error(model):
        _remove_scheme(model)
        mark_in_memory(model, marked=model.__dict__.pop("qk_norm_base_marked", True))  # a loaded model lacks it
    return model


def _remove_scheme(model: PreTrainedModel) -> None:
    backend = vars(model).pop("qk_norm_base_backend", None)
    if backend is None and model.config._attn_implementation not in functions.OWN_BACKENDS:  # of a loaded model
        backend = model.config._attn_implementation
    drop_record(model)
    unplan_norms(model)
    uninstall(model)
    for module in model.modules():
        if isinstance(module, QKNormModel):
            set_model_class(module, module.base_class)
    for owner in config_owners(model):
        if isinstance(owner.config, QKNormConfig):
            set_config(owner, owner.config.base())
    model.set_attn_implementation(backend or model.get_correct_attn_implementation(None))
    share_backend(model)


def patched_config(config: PretrainedConfig, scheme: Scheme) -> PretrainedConfig:
    """Return a copy of a family's config as its derived type, with the scheme. The original stays as it is."""
    check_names(vars(config))
    patched = copy.deepcopy(config)
    patched.__class__ = derived_config(config.model_type)
    for name in ("model_type", "auto_map"):  # a loaded config holds the type and code of the unpatched model
        vars(patched).pop(name, None)
    patched.qk_norm = patched.qk_norm_base = None
    patched.attn_logit_softcapping = getattr(config, "attn_logit_softcapping", None)
    patched.set_scheme(scheme)
    patched.architectures = derived_architectures(patched)
    return patched


def _is_patched(model: nn.Module) -> bool:
    """Whether `patch_model` patched the model, or the model was loaded from a patched checkpoint."""
    return isinstance(model, QKNormModel) or "qk_norm_base_backend" in vars(model)


def _require_bare(model: Any) -> None:
    """Refuse wrapped, altered and patched models. The messages say in which order to take the steps."""
    if type(model).__module__.partition(".")[0] == "peft":
        raise ValueError("this is a PEFT model: patch its base model first, then wrap it with get_peft_model")
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise ValueError("this model is compiled: patch it first, then compile it")
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    if isinstance(model, wrappers) or "FSDP" in type(model).__name__ or "FullySharded" in type(model).__name__:
        raise ValueError(
            f"this model is wrapped for several devices ({type(model).__name__}): patch it first, then wrap it"
        )
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"patch_model takes a transformers PreTrainedModel, got {type(model).__name__}")
    check_not_copied(model, "patch_model", OPTIMISED)
    layers = patched_layers(model)
    if _is_patched(model):
        scheme = next(iter(layers.values())).scheme
        raise ValueError(f"this model is patched already ({scheme}): call unpatch_model before you patch it again")
    if layers and not any(map(_is_patched, model.modules())):
        raise ValueError(
            "the attention layers of this model are watched, as after an exception in a step that a LogitMonitor "
            "samples: call its close() before you patch the model"
        )
    if getattr(model, "_hf_peft_config_loaded", False) or any(map(is_adapter_layer, model.modules())):
        raise ValueError("this model has adapters: patch it first, then add them (or merge them before patching)")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(
            "this model is quantised: patch and save it in full precision first, then load the patched checkpoint "
            "with quantization_config (the new gains are never quantised)"
        )
    if getattr(model, "_tp_size", None) is not None:
        raise ValueError(
            "this model is sharded by tensor parallelism: patch and save it first, then load the patched checkpoint "
            "with distributed_config=DistributedConfig(tp_size=...)"
        )


def _log(model: PreTrainedModel, scheme: Scheme) -> None:
    """Log what was added; as a warning for a pretrained model with new norms."""
    layers = patched_layers(model)
    norms = [module for module in model.modules() if isinstance(module, HeadNorm)]
    added = sum(p.numel() for module in norms for p in module.parameters())
    removed = sum(p.numel() for layer in layers.values() for norm in layer.removed_norm for p in norm.parameters())
    parameters = f"{added:,} parameters added" + (f" and {removed:,} removed" if removed else "")
    first = next(iter(layers.values()))
    own_cap = first.attn_logit_softcapping if first.family.own_cap else None
    note = ""
    if own_cap is not None:
        note = f"; its own cap of {own_cap:g} " + ("stays" if scheme.softcap is None else f"becomes {scheme.softcap:g}")
    pretrained = bool(model.name_or_path and norms)
    if pretrained:
        note += "; its gains are fresh: it predicts worse than before. calibrate(model, texts) restores it"
    level = logging.WARNING if pretrained else logging.INFO
    text = "patched %d attention layers (%s), %s, attention by %s%s"
    logger.log(level, text, len(layers), scheme, parameters, model.config._attn_implementation, note)
