"""Checks by which transformers' own classes refuse a patched checkpoint, which they would load without its scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hf_qknorm.families import family_of_type
from hf_qknorm.families.class_names import PREFIX, TYPE_PREFIX, classes_of
from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.untrusted import read_json
from hf_qknorm.scheme import Scheme


def check_config(post_init: Callable[..., None], config: Any, /, **settings: Any) -> None:
    """Raise UnpatchedClassError for a config of transformers' own with the `settings` of a patched checkpoint."""
    stored, own = settings.get("model_type"), type(config).model_type
    # a bare PretrainedConfig has no model type: no model is built from it
    if _is_derived(stored) and own and not _is_derived(own):
        raise _refusal(str(settings.get("name_or_path") or "config.json"), stored, type(config).__name__)
    post_init(config, **settings)


def check_weights(
    load: Callable[..., Any], /, model: Any, state_dict: Any, checkpoint_files: Any, *args: Any, **kwargs: Any
) -> Any:
    """Load weights by transformers' `load`, and refuse a patched checkpoint's for an unpatched model."""
    from hf_qknorm.model.derived import QKNormModel  # here, as the other imports of a model's code
    from hf_qknorm.model.load_checks import check_loaded, check_none_left, check_shapes, check_stored

    if isinstance(model, QKNormModel):
        return load(model, state_dict, checkpoint_files, *args, **kwargs)
    for file in (checkpoint_files or [])[:1]:
        stored = _stored_type(Path(file).with_name("config.json"))
        if _is_derived(stored):
            raise _refusal(str(Path(file).parent), stored, type(model).__name__)
    check_stored(model, state_dict, checkpoint_files)  # the checks from here on are for towers
    info, offloaded = load(model, state_dict, checkpoint_files, *args, **kwargs)
    check_shapes(model, info.mismatched_keys)
    check_loaded(model, info.missing_keys, info.unexpected_keys)
    check_none_left(model, info.unexpected_keys)
    return info, offloaded


def check_saved(save: Callable[..., Any], /, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Save a model by transformers' `save`, and refuse one whose layers have another scheme than its config.

    Such is the whole of a model in which a part was patched, unpatched or exchanged by itself. Raises ValueError before
    anything is written.
    """
    from hf_qknorm.model.attention import patched_layers
    from hf_qknorm.model.derived import QKNormModel
    from hf_qknorm.model.install import own_layers

    held, used = list(_schemes_in(model.config)), []
    for name, layer in patched_layers(model).items():
        used.append((type(layer.config), layer.scheme.to_dict()))
        if not layer.scheme.changes_nothing and used[-1] not in held:
            parts = (path for path, x in model.named_modules() if isinstance(x, QKNormModel))
            part = next((path for path in parts if name.startswith(f"{path}.")), name)
            raise ValueError(
                f"{name} of this {type(model).__name__} is patched, and the model's config does not hold its scheme "
                f"({layer.scheme}): a checkpoint would load without it. Restore the config, if its scheme was changed; "
                f"else save that part by itself, as model.{part}.save_pretrained(...), or call unpatch_model("
                f"model.{part}) first. If patch_model takes the whole model (tower=... names a part), the whole is "
                "saved with its scheme"
            )
    derived = (x for x in model.modules() if isinstance(x, QKNormModel))
    plain = [name for x in derived for name in own_layers(x, family_of_type(x.config.base_model_type))]
    if unused := [scheme for cls, scheme in held if plain or (cls, scheme) not in used]:
        lacking = f"{plain[0]} lacks" if plain and used else "no layer has"
        raise ValueError(
            f"this {type(model).__name__}'s config holds a scheme ({Scheme.from_dict(unused[0])}) that {lacking}, as "
            "after unpatch_model or remove_norms of a part: a checkpoint would load with it. Call these on the whole "
            "model; after a call on a part, put the part's config into the whole's"
        )
    return save(model, *args, **kwargs)


def _schemes_in(config: Any) -> Iterator[tuple[type, Any]]:
    """Yield class and stored scheme of a patched model's config, and of each config in a multimodal one."""
    if getattr(config, "qk_norm", None) is not None:
        yield type(config), config.qk_norm
    for key in getattr(config, "sub_configs", ()):
        if getattr(config, key, None) is not None:
            yield from _schemes_in(getattr(config, key))


def _is_derived(model_type: Any) -> bool:
    return isinstance(model_type, str) and model_type.startswith(TYPE_PREFIX)


def _stored_type(path: Path) -> Any:
    """Return the model type of a config.json; None if it can't be read, since the config came from elsewhere then."""
    try:
        config = read_json(path)
    except (OSError, ValueError):
        return None
    return config.get("model_type") if isinstance(config, dict) else None


def _refusal(where: str, stored: Any, cls: str) -> ValueError:
    from hf_qknorm.model.load_checks import UnpatchedClassError

    autos = classes_of(str(stored).removeprefix(TYPE_PREFIX))
    auto = next((name for name in ("AutoModelForCausalLM", "AutoModel", *autos) if name in autos), "AutoModel")
    return UnpatchedClassError(
        f"{where} is a patched checkpoint of model_type {shorten(stored)}, and {cls} would load it without its scheme. "
        f"Load it with an Auto class such as {auto} or AutoConfig, or with a class of "
        f"hf_qknorm.model.derived: {PREFIX}NAME for a class NAME, your own included; unpatch_model then gives the "
        "unpatched model"
    )
