"""`QKNormConfig`: the settings that a patched model's config adds to the unpatched one's."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from hf_qknorm.families import FAMILIES, check_scheme, family_of_type
from hf_qknorm.families.class_names import AUTO_CLASSES, COMPARED, PREFIX, TYPE_PREFIX, types_of
from hf_qknorm.families.family import nowhere
from hf_qknorm.files.formatting import shorten
from hf_qknorm.model.config_checks import check_settings, config_errors, config_file
from hf_qknorm.scheme import Scheme
from hf_qknorm.standalone.generate import write_standalone_code
from hf_qknorm.standalone.notice import NOTICES, is_notice

if TYPE_CHECKING:  # the mixin precedes a family's own config class and uses its methods
    from transformers import PretrainedConfig as _Config
else:
    _Config = object

OWN_SETTINGS: Final = ("qk_norm", "qk_norm_base", "attn_logit_softcapping")


class QKNormConfig(_Config):
    """A mixin for config classes that holds the scheme as `qk_norm`, and its cap as `attn_logit_softcapping`.

    `qk_norm` is given as a `Scheme`, a preset's name or JSON, and stored as JSON with "auto" resolved. A config.json
    must hold all of a scheme's fields. Servers read the cap from `attn_logit_softcapping`.
    `qk_norm_base` is the cap that the scheme replaced in a family with a cap of its own, for `unpatch_model`.
    Raises ValueError if a setting is malformed, contradicts another, or the family can't have the scheme.
    """

    qk_norm: Any
    qk_norm_base: Any
    attn_logit_softcapping: float | None
    base_model_type: ClassVar[str]

    def __post_init__(self, **kwargs: Any) -> None:
        stored_type = kwargs.pop("model_type", None)  # present only among settings from a config.json
        _check_type(type(self), stored_type)
        check_names(kwargs)
        super().__post_init__(**{key: value for key, value in kwargs.items() if not is_notice(key, value)})
        check_settings(self)
        self.validate()  # the base class's own validators, which a derived dataclass does not inherit
        _check_base(self.qk_norm_base)
        self.architectures = derived_architectures(self)
        if stored_type == self.model_type:
            _check_stored_base(self)
        if self.qk_norm is not None:
            scheme = Scheme.of(self.qk_norm) if stored_type is None else Scheme.stored(self.qk_norm)
            self.set_scheme(scheme, stated_cap=self.attn_logit_softcapping)

    @property
    def runs_own_forward(self) -> bool:
        """Whether the model's own forward calls the attention function: it may pass neither causality nor a window."""
        return family_of_type(self.base_model_type).runs_own_forward(self)

    @property
    def passes_window(self) -> bool:
        """Whether layers pass their window to the attention function, as well as to the mask."""
        return not self.runs_own_forward and family_of_type(self.base_model_type).slides is not nowhere

    @property
    def scheme(self) -> Scheme:
        """The scheme. Raises ValueError if `qk_norm` is not set."""
        if self.qk_norm is None:
            raise ValueError(
                f'a config of model_type "{TYPE_PREFIX}{self.base_model_type}" needs "qk_norm", the scheme: for '
                f'example {type(self).__name__}(qk_norm="qk_norm_cap")'
            )
        return Scheme.from_dict(self.qk_norm)

    def set_scheme(self, scheme: Scheme, stated_cap: float | None = None) -> None:
        """Set the scheme and its cap. `stated_cap` is the cap that the config already holds, or None."""
        scheme = scheme.resolve()
        check_scheme(self.base_model_type, self, scheme)
        if has_own_cap(type(self)) and self.qk_norm_base is None:
            self.qk_norm_base = {"attn_logit_softcapping": self.attn_logit_softcapping}
            _check_base(self.qk_norm_base)
            stated_cap = None
        cap = scheme.softcap
        if cap is None and self.qk_norm_base is not None:
            cap = self.qk_norm_base["attn_logit_softcapping"]
        if stated_cap is not None and stated_cap != cap:
            raise ValueError(
                f"attn_logit_softcapping={shorten(stated_cap)} contradicts qk_norm, whose softcap is {cap}: servers "
                "read the first, hf_qknorm the second. Make them equal, or remove attn_logit_softcapping"
            )
        self.qk_norm = scheme.to_dict()
        self.attn_logit_softcapping = cap
        # In memory other libraries read the base's type where the model's own forward computes attention, and where
        # they compare types; config.json has the derived one.
        if self.base_model_type in COMPARED or self.base_model_type not in FAMILIES:
            self.__dict__["model_type"] = self.base_model_type

    def base(self) -> _Config:
        """Return a copy as the family's own config, without the scheme."""
        base: Any = copy.deepcopy(self)
        base.__class__ = type(self).__mro__[2]  # the derived class, the mixin, the family's own class
        for name in ("model_type", "auto_map", *OWN_SETTINGS):
            vars(base).pop(name, None)
        vars(base).update(self.qk_norm_base or {})  # a family's own cap
        if base.architectures is not None:
            base.architectures = [name.removeprefix(PREFIX) for name in base.architectures]
        return base

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return transformers' dict; without an unpatched model's type, which `from_pretrained` would warn about."""
        config_dict, unused = super().get_config_dict(*args, **kwargs)
        if config_dict.get("model_type") == cls.base_model_type and "qk_norm" not in config_dict:
            config_dict = {key: value for key, value in config_dict.items() if key != "model_type"}
        return config_dict, unused

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build the config as transformers does. A scheme in `kwargs`, in any form, replaces the file's."""
        given = {key: kwargs.pop(key) for key in OWN_SETTINGS if key in kwargs}
        config_dict = dict(config_dict)
        if given.get("qk_norm") is not None:
            given["qk_norm"] = Scheme.of(given["qk_norm"]).to_dict()
            if config_dict.get("model_type") == cls.model_type:  # an unpatched model's config has the model's own cap
                config_dict.pop("attn_logit_softcapping", None)
        file = str(Path(kwargs.get("name_or_path", "")) / "config.json")
        with config_errors(file, config_dict.get("model_type"), config_dict.get("architectures")):
            return super().from_dict(config_dict | given, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return transformers' dict and the settings that make unpatched classes refuse the checkpoint."""
        return super().to_dict() | NOTICES

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save as transformers does, with the stand-alone code if the config has an `auto_map`."""
        if self.auto_map:
            write_standalone_code(self, Path(save_directory))
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: transformers renames the layer types of custom configs, which the model's own code reads."""
        return False

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: transformers would save this class's file alone, without the code that it needs."""


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError for a setting that would shadow an attribute of `QKNormConfig`."""
    for name in names:
        if name == "base_model_type" or name in vars(QKNormConfig):
            raise ValueError(
                f"config.json: {shorten(name)} is no setting, it is an attribute of the config's class. Remove it"
            )


def derived_architectures(config: Any) -> list[str] | None:
    """Return a config's `architectures` with derived class names, by which servers select the class."""
    if config.architectures is None:
        return None
    names = [name.removeprefix(PREFIX) for name in config.architectures]
    return [f"{PREFIX}{name}" if _fits(name, type(config)) else name for name in names]


def check_architectures(config: Any) -> None:
    """Raise ValueError if `architectures` names a class of other model types."""
    for name in config.architectures or ():
        base = name.removeprefix(PREFIX)
        if not _fits(base, type(config)):
            raise ValueError(
                f'{config_file(config)}: "architectures" names {name}, a class of {", ".join(sorted(types_of(base)))}, '
                f"which does not fit model_type {type(config).model_type!r}. Restore the config.json that was saved "
                "with the weights"
            )


def _fits(name: str, cls: Any) -> bool:
    """Whether the class `name` can have the derived config `cls`. A class that no Auto class loads can have any."""
    types = types_of(name)
    return not types or cls.base_model_type in types


def has_own_cap(cls: Any) -> bool:
    """Whether the family's own config class has `attn_logit_softcapping`. It follows the derived one and the mixin."""
    return hasattr(cls.__mro__[2], "attn_logit_softcapping")


def _check_type(cls: Any, stored: Any) -> None:
    """Raise ValueError for settings of another model type than the derived or the unpatched one.

    InternLM 3 and other types without model classes of their own count as the type of their classes, Llama.
    """
    if stored in (None, cls.model_type, cls.base_model_type):
        return
    base = stored.removeprefix(TYPE_PREFIX) if isinstance(stored, str) else None
    if not any(base in names and names[base] == names.get(cls.base_model_type) for names in AUTO_CLASSES.values()):
        raise ValueError(
            f"config.json: model_type is {shorten(stored)}, and {cls.__name__} reads {cls.model_type!r}. Load it with "
            "an Auto class, or restore the config.json that was saved with the weights"
        )


def _check_stored_base(config: Any) -> None:
    """Raise ValueError unless a stored config has `qk_norm_base` exactly if the family has a cap of its own."""
    if (config.qk_norm_base is not None) != has_own_cap(type(config)) and config.qk_norm is not None:
        expected = '{"attn_logit_softcapping": the cap without a scheme}' if has_own_cap(type(config)) else "null"
        raise ValueError(
            f'config.json: "qk_norm_base" is {shorten(config.qk_norm_base)}, expected {expected} for model_type '
            f"{config.model_type!r}. Restore the config.json that was saved with the weights"
        )


def _check_base(value: Any) -> None:
    """Raise ValueError unless `qk_norm_base` is None, or has a cap or None."""
    if value is None:
        return
    if not isinstance(value, dict) or [*value] != ["attn_logit_softcapping"]:
        raise ValueError(f'qk_norm_base is {shorten(value)}, expected None or {{"attn_logit_softcapping": a cap}}')
    Scheme(softcap=value["attn_logit_softcapping"])  # raises ValueError for an invalid cap
