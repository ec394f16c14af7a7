"""`QKNormConfig`: what a patched model's config holds besides its base's, and how it is read and written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from hf_qknorm.families import FAMILIES, check_scheme
from hf_qknorm.families.class_names import AUTO_CLASSES, PREFIX, TYPE_PREFIX, types_of
from hf_qknorm.files.formatting import shorten
from hf_qknorm.model.settings import check_settings, config_errors, config_file
from hf_qknorm.scheme import Scheme
from hf_qknorm.standalone import write_code
from hf_qknorm.standalone.notice import NOTICES, is_notice

if TYPE_CHECKING:  # the mixin stands in front of a family's own config class and leans on its methods
    from transformers import PretrainedConfig as _Config
else:
    _Config = object

OWN_SETTINGS: Final = ("qk_norm", "qk_norm_base", "qk_norm_blend", "attn_logit_softcapping")


class QKNormConfig(_Config):
    """Mixed into a config class: the scheme as `qk_norm`, its cap as `attn_logit_softcapping` for servers.

    `qk_norm` may be given as a `Scheme`, a preset's name or JSON; it is kept as JSON, with "auto" resolved. A
    config.json must hold all of a scheme's fields.
    `qk_norm_base` holds what the scheme overwrote in a family with a cap of its own, so that it can be undone.
    `qk_norm_blend` says what is on its way in (`hf_qknorm.training.blend`): None, or whether the norms hold a blend,
    and the cap at the end, while `qk_norm` has the one in force.
    Raises ValueError if it is malformed, contradicts another setting, or the family can't have the scheme.
    """

    qk_norm: Any
    qk_norm_base: Any
    qk_norm_blend: Any
    attn_logit_softcapping: float | None
    base_model_type: ClassVar[str]

    def __post_init__(self, **kwargs: Any) -> None:
        stored_type = kwargs.pop("model_type", None)  # only a config.json's settings say it
        _check_type(type(self), stored_type)
        check_names(kwargs)
        super().__post_init__(**{key: value for key, value in kwargs.items() if not is_notice(key, value)})
        check_settings(self)
        self.validate()  # the base class's own validators, which a derived dataclass does not inherit
        _check_base(self.qk_norm_base)
        _check_blend(self.qk_norm_blend)
        self.architectures = derived_architectures(self)
        if stored_type == self.model_type:
            _check_stored_base(self)
        if self.qk_norm is not None:
            scheme = Scheme.of(self.qk_norm) if stored_type is None else Scheme.stored(self.qk_norm)
            self.set_scheme(scheme, stated_cap=self.attn_logit_softcapping)

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
        """Record the scheme and its cap; `stated_cap` is the cap that the config already states, or None."""
        family = FAMILIES[self.base_model_type]
        scheme = scheme.resolve(family.norm)
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
                "read the first, hf_qknorm the second. Make them equal, or leave attn_logit_softcapping out"
            )
        self.qk_norm = scheme.to_dict()
        self.attn_logit_softcapping = cap

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """transformers' own; a scheme among `kwargs`, in any of its forms, takes the place of the one in the file."""
        given = {key: kwargs.pop(key) for key in OWN_SETTINGS if key in kwargs}
        config_dict = dict(config_dict)
        if given.get("qk_norm") is not None:
            given["qk_norm"] = Scheme.of(given["qk_norm"]).to_dict()
            if config_dict.get("model_type") == cls.model_type:  # of a plain model it is the model's own cap
                config_dict.pop("attn_logit_softcapping", None)
        file = str(Path(kwargs.get("name_or_path", "")) / "config.json")
        with config_errors(file, config_dict.get("model_type"), config_dict.get("architectures")):
            return super().from_dict(config_dict | given, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """transformers' own, with the settings by which plain classes refuse the checkpoint."""
        return super().to_dict() | NOTICES

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


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError for a setting that would hide a part of `QKNormConfig`."""
    for name in names:
        if name == "base_model_type" or name in vars(QKNormConfig):
            raise ValueError(
                f"config.json: {shorten(name)} is no setting, it is the name of a part of the config's class. Remove it"
            )


def derived_architectures(config: Any) -> list[str] | None:
    """A config's `architectures`, by which servers choose a class, with the derived names of the family's classes."""
    if config.architectures is None:
        return None
    names = [name.removeprefix(PREFIX) for name in config.architectures]
    return [f"{PREFIX}{name}" if _fits(name, type(config)) else name for name in names]


def check_architectures(config: Any) -> None:
    """Raise ValueError where `architectures` names a class of other model types."""
    for name in config.architectures or ():
        base = name.removeprefix(PREFIX)
        if not _fits(base, type(config)):
            raise ValueError(
                f'{config_file(config)}: "architectures" names {name}, a class of {", ".join(sorted(types_of(base)))}, '
                f"which does not fit model_type {config.model_type!r}. Restore the config.json that was saved with the "
                "weights"
            )


def _fits(name: str, cls: Any) -> bool:
    """Whether a derived config may be that of the class of this name; a class that no Auto class has may be any's."""
    types = types_of(name)
    return not types or cls.base_model_type in types


def has_own_cap(cls: Any) -> bool:
    """Whether the family's own config class, behind the derived one and the mixin, has `attn_logit_softcapping`."""
    return hasattr(cls.__mro__[2], "attn_logit_softcapping")


def _check_type(cls: Any, stored: Any) -> None:
    """Raise ValueError for settings of another model type; the plain one's may be given a scheme.

    A type without classes of its own, as InternLM 3, is that of the classes that serve it, as Llama's.
    """
    if stored in (None, cls.model_type, cls.base_model_type):
        return
    base = stored.removeprefix(TYPE_PREFIX) if isinstance(stored, str) else None
    if not any(base in names and names[base] == names.get(cls.base_model_type) for names in AUTO_CLASSES.values()):
        raise ValueError(
            f"config.json: model_type is {shorten(stored)}, and {cls.__name__} reads {cls.model_type!r}. Load it by an "
            "Auto class, or restore the config.json that was saved with the weights"
        )


def _check_stored_base(config: Any) -> None:
    """Raise ValueError unless a stored config holds `qk_norm_base` exactly where the family has a cap of its own."""
    if (config.qk_norm_base is not None) != has_own_cap(type(config)) and config.qk_norm is not None:
        expected = '{"attn_logit_softcapping": the cap without a scheme}' if has_own_cap(type(config)) else "null"
        raise ValueError(
            f'config.json: "qk_norm_base" is {shorten(config.qk_norm_base)}, expected {expected} for model_type '
            f"{config.model_type!r}. Restore the config.json that was saved with the weights"
        )


def _check_base(base: Any) -> None:
    if base is None:
        return
    if not isinstance(base, dict) or set(base) != {"attn_logit_softcapping"}:
        raise ValueError(f'qk_norm_base is {shorten(base)}, expected None or {{"attn_logit_softcapping": a cap}}')
    Scheme(softcap=base["attn_logit_softcapping"])  # raises for what is no cap


def _check_blend(blend: Any) -> None:
    if blend is None:
        return
    if not isinstance(blend, dict) or set(blend) != {"norms", "softcap"} or not isinstance(blend["norms"], bool):
        expected = 'None or {"norms": true or false, "softcap": a cap}'
        raise ValueError(f"qk_norm_blend is {shorten(blend)}, expected {expected}")
    Scheme(softcap=blend["softcap"])  # raises for what is no cap
