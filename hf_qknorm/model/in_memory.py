"""The name of a model that was patched, calibrated or unpatched in memory: no checkpoint holds that model yet.

Tools load a model by the name of another: TRL its reference model by the policy's, PEFT an adapter's base model. By the
name that the model was loaded by they get its tokenizer, but other weights or another scheme.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable
from typing import Any, Final

LOADING: Final = ("dtype", "torch_dtype", "device_map")

logger = logging.getLogger("hf_qknorm")


class InMemoryName(str):
    """The name by which a model was loaded before it was changed in memory: `from_pretrained` copies the model for it.

    A copy of the model has a name of its own. Any other copy of the name, and the name in a file, is a plain string.
    """

    model: Callable[[], Any]

    def __new__(cls, name: str, model: Any) -> InMemoryName:
        marked = super().__new__(cls, name)
        marked.model = weakref.ref(model)
        return marked

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        copied = memo.get(id(self.model()))
        return str(self) if copied is None else InMemoryName(self, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)

    def load(self, cls: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return a copy of the model, without the hooks on it, and transformers' account of the loading.

        Of the `options` of `from_pretrained`, the dtype (by default `model.dtype`), the device and the attention
        backend are used. Raises ValueError if the model is no `cls`, or can't be copied.
        """
        caller, model = f"{cls.__name__}.from_pretrained", self.model()
        reason = "it is no longer in memory" if model is None else _why_not_copied(model, cls, options)
        if reason is not None:
            raise self.refusal(caller, reason)
        logger.warning(
            "%s(%r): the model of this name was changed in memory, and is copied as it is now", caller, str(self)
        )
        config = copy.deepcopy(model.config)
        settings = {name: options[name] for name in LOADING if options.get(name) is not None}
        dtype = settings.pop("torch_dtype", model.dtype)  # the old name of dtype
        settings = {"dtype": dtype, **settings, "attn_implementation": _backend(config, options)}
        weights = {name: weight.clone() for name, weight in model.state_dict().items()}
        loaded, info = type(model).from_pretrained(
            None, config=config, state_dict=weights, output_loading_info=True, **settings
        )
        if missing := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
            raise self.refusal(caller, f"another tool has changed its weights' names, such as {missing[0]}")
        if model.can_generate():  # transformers reads these settings from a file
            loaded.generation_config = copy.deepcopy(model.generation_config)
        for named in (loaded.config, *_named_modules(loaded)):
            named.name_or_path = str(self)
        mark_in_memory(loaded)
        return loaded, info

    def config_dict(self) -> dict[str, Any] | None:
        """Return the model's config as it is in a file; None if the model is no longer in memory."""
        if (model := self.model()) is None:
            return None
        return {key: x for key, x in model.config.to_dict().items() if key not in ("_name_or_path", "auto_map")}

    def refusal(self, caller: str, reason: str) -> ValueError:
        """Return the error of a `caller` that got the name and can't have the model, for this `reason`."""
        return ValueError(
            f"{caller} got the name of a model that was changed in memory, and can't copy that model: {reason}. "
            f"{str(self)!r} has the model as it was before. Save the changed model and give its folder, or pass a "
            "model in place of a name; for the model as it was, give str(name)"
        )

    def unsaved(self) -> str:
        """Return the name that files get, which no tool can load: the base model of an adapter, for example."""
        return f"{self} (changed in memory, not saved: put the folder of the saved model here)" if self else ""


def _why_not_copied(model: Any, cls: Any, options: dict[str, Any]) -> str | None:
    """The reason why `cls.from_pretrained` can't copy a model with these options; None if it can."""
    from torch.distributed.tensor import DTensor  # here, since it takes long to import

    parameters = list(model.parameters())
    if not isinstance(model, cls):
        return f"it is a {type(model).__name__}"
    if any(parameter.is_meta for parameter in parameters):
        return "some of its weights are offloaded"
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        return "DeepSpeed ZeRO-3 shards its weights"
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        return "its weights are sharded"
    if getattr(model, "hf_quantizer", None) is not None:
        return "its weights are quantised"
    if options.get("quantization_config") is not None:
        return "quantization_config needs weights from the disk"
    return None


def _backend(config: Any, options: dict[str, Any]) -> str | dict[str, str]:
    """Return the attention backend that the options ask for; by default the one of each part of the model."""
    requested: str | None = options.get("attn_implementation")
    requested = requested or getattr(options.get("config"), "_attn_implementation", None)
    if requested not in (None, config._attn_implementation):  # TRL requests the whole model's for every tower
        return requested
    parts = {key: part for key in config.sub_configs if (part := getattr(config, key, None)) is not None}
    return {key: part._attn_implementation for key, part in {"": config, **parts}.items()}


def mark_in_memory(model: Any) -> None:
    """Mark the names of `model` and its config: the weights in memory differ from that checkpoint."""
    model.config._name_or_path = InMemoryName(model.config.name_or_path, model)
    for module in _named_modules(model):
        module.name_or_path = InMemoryName(module.name_or_path, model)


def unmark(model: Any) -> None:
    """Make the names of `model` and its config plain strings again."""
    model.config._name_or_path = str(model.config.name_or_path)
    for module in _named_modules(model):
        module.name_or_path = str(module.name_or_path)


def _named_modules(model: Any) -> list[Any]:
    """The models of transformers in `model` that share its config: itself, and its base model."""
    return [x for x in model.modules() if "name_or_path" in vars(x) and getattr(x, "config", None) is model.config]
