"""Config and model classes derived from each family's own: what a patched model is.

A patched Llama is a `QKNormLlamaForCausalLM` with a `QKNormLlamaConfig` of model_type "qknorm_llama", so that
everything that saves or loads a model records what it is.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, initialization
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from hf_qknorm import functions
from hf_qknorm.attention import PREFIX, TYPE_PREFIX, install, patched_layers
from hf_qknorm.families import FAMILIES, Family, check_scheme, known_families
from hf_qknorm.hub.loaded import check_loaded, check_none_missing, checked_afterwards
from hf_qknorm.hub.standalone import carry_code, write_code
from hf_qknorm.norms import HeadNorm
from hf_qknorm.parallel import plan_norms
from hf_qknorm.scheme import Scheme
from hf_qknorm.strangers import brief

if TYPE_CHECKING:  # the mixins stand in front of a model's own classes and lean on their methods
    from transformers import PretrainedConfig as _Config
    from transformers import PreTrainedModel as _Model
else:
    _Config = _Model = object


class QKNormConfig(_Config):
    """Mixed into a config class: the scheme as `qk_norm`, its cap as `attn_logit_softcapping` for servers.

    `qk_norm` may be given as a `Scheme`, a preset's name or JSON; it is kept as JSON, with "auto" resolved.
    `qk_norm_base` holds what the scheme overwrote in a family with a cap of its own, so that it can be undone.
    `qk_norm_blend` says what is on its way in (`hf_qknorm.training.blend`): None, or whether the norms hold a blend,
    and the cap at the end, while `qk_norm` has the one in force.
    Raises ValueError if it is malformed, or contradicts `attn_logit_softcapping`.
    """

    qk_norm: Any
    qk_norm_base: Any
    qk_norm_blend: Any
    attn_logit_softcapping: float | None
    base_model_type: ClassVar[str]

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        _check_base(self.qk_norm_base)
        _check_blend(self.qk_norm_blend)
        if self.qk_norm is not None:
            self.set_scheme(Scheme.of(self.qk_norm), stated_cap=self.attn_logit_softcapping)

    @property
    def scheme(self) -> Scheme:
        """What is done to attention. Raises ValueError if `qk_norm` is not there."""
        if self.qk_norm is None:
            raise ValueError(
                f'a config of model_type "{TYPE_PREFIX}{self.base_model_type}" needs "qk_norm", the scheme: for '
                f'example {type(self).__name__}(qk_norm="qk_norm_cap")'
            )
        return Scheme.from_dict(self.qk_norm)

    def set_scheme(self, scheme: Scheme, stated_cap: float | None = None) -> None:
        """Record the scheme and its cap; `stated_cap` is what the config says that the cap is, if it does."""
        family = FAMILIES[self.base_model_type]
        scheme = scheme.resolve(family.norm)
        check_scheme(self.base_model_type, self, scheme)
        if hasattr(type(self).__mro__[2], "attn_logit_softcapping") and self.qk_norm_base is None:  # the base's own
            self.qk_norm_base = {"attn_logit_softcapping": self.attn_logit_softcapping}
            _check_base(self.qk_norm_base)
            stated_cap = None
        cap = scheme.softcap
        if cap is None and self.qk_norm_base is not None:
            cap = self.qk_norm_base["attn_logit_softcapping"]
        if stated_cap is not None and stated_cap != cap:
            raise ValueError(
                f"attn_logit_softcapping={brief(stated_cap)} contradicts qk_norm, whose softcap is {cap}: servers read "
                "the first, hf_qknorm the second. Make them equal, or leave attn_logit_softcapping out"
            )
        self.qk_norm = scheme.to_dict()
        self.attn_logit_softcapping = cap

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """transformers' own; the stand-alone code goes along where `auto_map` says that the checkpoint carries it."""
        if getattr(self, "auto_map", None):
            write_code(self, Path(save_directory))
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: the base's own code reads its layers' kinds, which keep the names that it gave them."""
        return False

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: transformers would save this class's file alone, and `auto_map` says what is to be saved."""


def _check_base(base: Any) -> None:
    if base is None:
        return
    if not isinstance(base, dict) or set(base) != {"attn_logit_softcapping"}:
        raise ValueError(f'qk_norm_base is {brief(base)}, expected None or {{"attn_logit_softcapping": a cap}}')
    Scheme(softcap=base["attn_logit_softcapping"])  # raises for what is no cap


def _check_blend(blend: Any) -> None:
    if blend is None:
        return
    if not isinstance(blend, dict) or set(blend) != {"norms", "softcap"} or not isinstance(blend["norms"], bool):
        expected = 'None or {"norms": true or false, "softcap": a cap}'
        raise ValueError(f"qk_norm_blend is {brief(blend)}, expected {expected}")
    Scheme(softcap=blend["softcap"])  # raises for what is no cap


class QKNormModel(_Model):
    """Mixed into a model class: builds the patched layers, and refuses backends and weights that don't fit them."""

    base_class: ClassVar[type[PreTrainedModel]]
    config: Any
    _supports_attention_backend = True  # each call goes through the interface, so that a server can put its own there

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        scheme = config.scheme
        super().__init__(config, *args, **kwargs)
        adopt(self)
        install(self, FAMILIES[config.base_model_type], scheme)
        plan_norms(self)

    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, HeadNorm):
            super()._init_weights(module)
            return
        check_none_missing(self)
        for parameter, fresh in ((module.weight, module.fresh), (module.bias, 0.0)):
            if parameter is not None:
                initialization.constant_(parameter, fresh)  # it leaves alone what came from a checkpoint

    @classmethod
    def is_custom_code(cls) -> bool:
        """No more than its base: transformers sets up less of custom code, such as buffers that no checkpoint has."""
        return cls.base_class.is_custom_code()

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """transformers' check of a backend; a capped scheme also refuses those that can't cap."""
        softcap = self.config.scheme.softcap or (self.config.qk_norm_blend or {}).get("softcap")
        if softcap is not None:
            requested_attention = requested_attention or functions.cap_backend(self.config)
            functions.check_cap_backend(requested_attention, softcap)
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return cls.base_class._can_set_attn_implementation()  # it reads the source of the class's own module

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls.base_class._can_set_experts_implementation()

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """transformers' own; with `push_to_hub` the stand-alone code goes along."""
        if kwargs.get("push_to_hub"):
            carry_code(self.config)
        super().save_pretrained(*args, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> str:
        """transformers' own push of the model alone; the stand-alone code goes along."""
        carry_code(self.config)
        return super().push_to_hub(*args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: transformers would save this class's file alone, and the config saves the stand-alone code."""

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """`PreTrainedModel.from_pretrained`; raises ValueError when the scheme and the weights disagree."""
        with checked_afterwards():
            model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        check_loaded(model, info)
        for layer in patched_layers(model).values():
            layer.removed_norm = ()  # no checkpoint keeps it
        return (model, info) if output_loading_info else model


def adopt(model: PreTrainedModel) -> None:
    """Give `model` and the family's models inside it (its base model) their derived classes, in place."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not isinstance(module, QKNormModel) and _family_of(type(module)):
            base: Any = type(module)
            set_class(module, derived_model(base))


def set_class(model: PreTrainedModel, cls: type[PreTrainedModel]) -> None:
    """Swap a model's class, and keep `output_hidden_states` and the like working: they are registered by class."""
    model.__class__ = cls
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(cls), model._can_record_outputs)


def _family_of(cls: type[PreTrainedModel]) -> Family | None:
    config_class = cls.config_class
    return FAMILIES.get(config_class.model_type) if config_class is not None else None


@cache
def derived_config(model_type: str) -> type[PretrainedConfig]:
    """`QKNormLlamaConfig` for "llama"."""
    base = getattr(transformers, CONFIG_MAPPING_NAMES[model_type])
    fields: dict[str, Any] = {"qk_norm": Any, "qk_norm_base": Any, "qk_norm_blend": Any}
    if not hasattr(base, "attn_logit_softcapping"):
        fields["attn_logit_softcapping"] = float | None
    namespace = {
        "__annotations__": fields,
        **dict.fromkeys(fields),  # None by default
        "__module__": __name__,
        "model_type": f"{TYPE_PREFIX}{model_type}",
        "base_model_type": model_type,
    }
    return type(f"{PREFIX}{base.__name__}", (QKNormConfig, base), namespace)


@cache
def derived_model(base: Any) -> type[PreTrainedModel]:
    """`QKNormLlamaForCausalLM` for `LlamaForCausalLM`."""
    model_type = base.config_class.model_type
    config_class = derived_config(model_type)
    derived = type(
        f"{PREFIX}{base.__name__}",
        (QKNormModel, base),
        {"base_class": base, "config_class": config_class, "__module__": __name__},
    )
    # Mixtral's experts are stored apart, GPT-NeoX's head under another name: the derived class converts them alike.
    for own, name in ((model_type, config_class.model_type), (base.__name__, derived.__name__)):
        conversion = get_checkpoint_conversion_mapping(own)
        if conversion is not None:
            register_checkpoint_conversion_mapping(name, conversion, overwrite=True)
    return derived


def named(name: str) -> Any:
    """The derived class of that name. Raises AttributeError for one that no family has."""
    base_name = name.removeprefix(PREFIX)
    types = known_families()
    for model_type in types:
        if CONFIG_MAPPING_NAMES[model_type] == base_name:
            return derived_config(model_type)
    for model_type in types:
        package = importlib.import_module(f"transformers.models.{model_type_to_module_name(model_type)}")
        if base_name in dir(package):
            return derived_model(getattr(package, base_name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __getattr__(name: str) -> Any:
    """`QKNormLlamaForCausalLM` and the like, by name: for pickling, and for those who want the class itself."""
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return named(name)
