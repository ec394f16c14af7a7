"""`patch_model` and `unpatch_model`: put a scheme on a model in memory, and take it off again."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from hf_qknorm.backends import functions
from hf_qknorm.families import Family, check_scheme, family_of
from hf_qknorm.families.class_names import PREFIX
from hf_qknorm.model.accelerate_hooks import check_room
from hf_qknorm.model.attention import install, own_layers, patched_layers, uninstall
from hf_qknorm.model.causality import can_check_causality, is_causal
from hf_qknorm.model.config_checks import no_attention_error
from hf_qknorm.model.configs import check_names, derived_architectures
from hf_qknorm.model.derived import QKNormModel, adopt, derived_config, set_model_class
from hf_qknorm.model.fold import check_foldable, fold_pre_norms
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.model.tensor_parallel import plan_norms, unplan_norms
from hf_qknorm.model.towers import check_travels, pick_tower, towers_of, with_config
from hf_qknorm.scheme import Scheme

logger = logging.getLogger("hf_qknorm")


def patch_model(
    model: PreTrainedModel,
    scheme: Scheme | str | Mapping[str, Any] = "qk_norm_cap",
    *,
    attn_implementation: str | None = None,
    tower: str | None = None,
) -> PreTrainedModel:
    """Put `scheme` (a preset's name, a `Scheme`, or its JSON form) on every attention layer of `model`, in place.

    Fresh gains are 1: a trained model loses part of what it knew until `calibrate` fits them. With `pre_norm=False` the
    norm in front of attention is folded into the projections, for good. The backend becomes "hf_qknorm" for a scheme
    with a cap ("eager" where `config.output_attentions` asks for the weights) and stays what it was for one without;
    `attn_implementation` overrides. Of a multimodal model one tower
    is patched: the text tower, or the one that `tower` names, as "vision_tower". Returns the model, which now saves,
    loads and trains as a patched one.

    Raises TypeError for what is no transformers model, and ValueError, with the model untouched, for a model, a
    wrapper or a backend that the scheme can't be put on, and for a model that is patched already.
    """
    scheme = Scheme.of(scheme)
    _require_bare(model)
    picked = pick_tower(model, tower)
    if picked is not None:
        return _patch_tower(model, *picked, scheme, attn_implementation)
    family = family_of(model.config)
    scheme = scheme.resolve(family.norm)
    check_scheme(model.config.model_type, model.config, scheme)
    _require_own_forward(model, family)
    if scheme.norms:
        check_room(model, own_layers(model, family))
    if not scheme.pre_norm:
        check_foldable(model, family)
    backend = attn_implementation or (functions.cap_backend(model.config) if scheme.softcap is not None else None)
    if backend is not None:
        if scheme.softcap is not None:
            functions.check_cap_backend(backend, scheme.softcap)
        backend = model.get_correct_attn_implementation(backend)
    causal = _causality(model) if family.is_causal(model.config) else None
    base_backend = model.config._attn_implementation
    config = patched_config(model.config, scheme)
    try:
        _set_config(model, config)
        adopt(model)
        install(model, family, scheme)
        plan_norms(model)
        model.qk_norm_base_backend = base_backend
        if backend is not None:
            model.set_attn_implementation(backend)
        _check_causality(model, causal)
    except Exception:
        _undo(model)
        raise
    _log(model, scheme)
    if not scheme.pre_norm:
        fold_pre_norms(model)
    return model


def _patch_tower(
    model: PreTrainedModel, path: str, key: str, scheme: Scheme, attn_implementation: str | None
) -> PreTrainedModel:
    """`patch_model` of the model at `path` within a multimodal one, whose config has the tower's under `key`."""
    tower: Any = model.get_submodule(path)
    _require_bare(tower)
    family = family_of(tower.config)
    check_travels(model, path, key, patched_config(tower.config, scheme), family)
    patch_model(tower, scheme, attn_implementation=attn_implementation)
    _set_config(model, with_config(model.config, key, tower.config))
    return model


def unpatch_model(model: PreTrainedModel) -> PreTrainedModel:
    """Take the scheme off, in place: the model computes exactly what its base weights do. Returns the model.

    Of a multimodal model it comes off every patched tower.

    Raises ValueError if the model is not patched, and for `pre_norm=False`: the norm in front of attention is in the
    projections since, and once they are trained nothing tells the two apart.
    """
    patched = {
        path: key for path, key in towers_of(model).items() if isinstance(model.get_submodule(path), QKNormModel)
    }
    for path, key in patched.items():
        tower: Any = unpatch_model(model.get_submodule(path))
        _set_config(model, with_config(model.config, key, tower.config))
    if patched:
        return model
    if not isinstance(model, QKNormModel):
        raise ValueError(f"{type(model).__name__} is not patched: there is nothing to undo")
    if not model.config.scheme.pre_norm:
        raise ValueError(
            "the scheme folded the norm in front of attention into the projections (pre_norm=False), which can't be "
            "undone: after training nothing tells the two apart. Load the original checkpoint instead"
        )
    return _undo(model)


def _undo(model: PreTrainedModel) -> PreTrainedModel:
    base_backend = getattr(model, "qk_norm_base_backend", None)
    unplan_norms(model)
    uninstall(model)
    for module in model.modules():
        if isinstance(module, QKNormModel):
            set_model_class(module, module.base_class)
    _set_config(model, _base_config(model.config))
    model.set_attn_implementation(base_backend or model.get_correct_attn_implementation(None))
    if base_backend is not None:
        del model.qk_norm_base_backend
    return model


def patched_config(config: PretrainedConfig, scheme: Scheme) -> PretrainedConfig:
    """A copy of a family's config as its derived type, with the scheme; other models may share the original."""
    check_names(vars(config))
    patched = copy.deepcopy(config)
    patched.__class__ = derived_config(config.model_type)
    for name in ("model_type", "auto_map"):  # a loaded config holds its type beside its class; the code is another's
        vars(patched).pop(name, None)
    patched.qk_norm = patched.qk_norm_base = patched.qk_norm_blend = None
    patched.attn_logit_softcapping = getattr(config, "attn_logit_softcapping", None)
    patched.set_scheme(scheme)
    patched.architectures = derived_architectures(patched)
    return patched


def _base_config(config: Any) -> PretrainedConfig:
    base: Any = copy.deepcopy(config)
    base.__class__ = type(config).__mro__[2]  # the derived class, the mixin, the family's own class
    if config.qk_norm_base is None:
        del base.attn_logit_softcapping
    else:
        base.attn_logit_softcapping = config.qk_norm_base["attn_logit_softcapping"]
    del base.qk_norm, base.qk_norm_base, base.qk_norm_blend
    for name in ("model_type", "auto_map"):
        vars(base).pop(name, None)
    if base.architectures is not None:
        base.architectures = [name.removeprefix(PREFIX) for name in base.architectures]
    return base


def _set_config(model: PreTrainedModel, config: PretrainedConfig) -> None:
    old = model.config
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = config


def _require_bare(model: Any) -> None:
    """Refuse wrapped and altered models, with the right order of steps."""
    package = type(model).__module__.partition(".")[0]
    if package == "peft":
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
    if isinstance(model, QKNormModel):
        raise ValueError(
            f"this model is patched already ({model.config.scheme}): call unpatch_model first to put another scheme"
        )
    if getattr(model, "_hf_peft_config_loaded", False):
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


def _require_own_forward(model: PreTrainedModel, family: Family) -> None:
    """Refuse a model without the family's attention, or whose attention forward another tool has replaced."""
    layers = own_layers(model, family)
    if not layers:
        raise no_attention_error(model, family.attention)
    for name, layer in layers.items():
        hooked = getattr(layer, "_hf_hook", None) is not None
        replaced = "forward" in vars(layer) and not hooked
        if replaced or not type(layer).forward.__module__.startswith("transformers."):
            raise ValueError(
                f"{name}: another tool has replaced the forward of {family.attention}, and patching would undo what "
                "it did. Load the model afresh and patch it first"
            )


def _causality(model: PreTrainedModel) -> bool | Exception | None:
    """Whether the model is causal, or what its forward raises here; None where finding out is not free."""
    try:
        return is_causal(model) if can_check_causality(model) else None
    except Exception as error:
        return error


def _check_causality(model: PreTrainedModel, before: bool | Exception | None) -> None:
    """Raise RuntimeError if the patched model fails, or is not causal, by what patching or its backend does.

    Warns where causality can't be checked here: the model failed before, or the backend does not run.
    """
    if before is None:
        return
    unchecked = "patched, but whether it is causal is not checked:"
    if isinstance(before, Exception):
        logger.warning("%s its forward failed here before it was patched too (%s)", unchecked, _brief(before))
        return
    after = _causality(model)
    backend = model.config._attn_implementation
    if after is False and (before or _runs_plainly(model, backend)):  # else the model itself is not causal
        raise RuntimeError(
            f"with attn_implementation={backend!r} a later token changes earlier outputs: causality is lost. Was the "
            "backend registered without a mask function (AttentionMaskInterface)?"
        )
    if isinstance(after, Exception):
        if not _runs_plainly(model, backend):
            raise RuntimeError(
                f"the patched model's forward fails, which the unpatched model's does not: {_brief(after)}"
            ) from after
        logger.warning("%s attn_implementation=%r does not run here (%s)", unchecked, backend, _brief(after))


def _runs_plainly(model: PreTrainedModel, backend: str) -> bool:
    """Whether the patched model's forward is right without the backend's own code."""
    model.set_attn_implementation("hf_qknorm_eager")
    try:
        return _causality(model) is True
    finally:
        model.set_attn_implementation(backend)


def _brief(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"


def _log(model: PreTrainedModel, scheme: Scheme) -> None:
    layers = patched_layers(model)
    norms = [module for module in model.modules() if isinstance(module, HeadNorm)]
    added = sum(p.numel() for norm in norms for p in norm.parameters())
    removed = sum(p.numel() for layer in layers.values() for norm in layer.removed_norm for p in norm.parameters())
    text = f"{added:,} parameters added" + (f" and {removed:,} removed" if removed else "")
    family = next(iter(layers.values())).family
    own_cap = (model.config.qk_norm_base or {}).get("attn_logit_softcapping") if family.own_cap else None
    note = ""
    if own_cap is not None and scheme.softcap is None:
        note = f"; it keeps its own cap of {own_cap:g}"
    elif own_cap is not None:
        note = f"; its own cap of {own_cap:g} becomes {scheme.softcap:g}"
    log: Callable[..., None] = logger.info
    if model.name_or_path and norms:
        log = logger.warning
        fresh = "its gains are fresh"
        if scheme.knee:
            fresh += f", and its knee of {scheme.knee:g} assumes that the mean square of what arrives at each norm is 1"
        note += f"; {fresh}, so that it lost part of what it knew: calibrate(model, texts) keeps it"
    backend = model.config._attn_implementation
    log("patched %d attention layers (%s), %s, attention by %s%s", len(layers), scheme, text, backend, note)
