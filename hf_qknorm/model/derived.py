"""Config and model classes of patched models, derived from each family's own.

A patched Llama is a `QKNormLlamaForCausalLM` with a `QKNormLlamaConfig` of model_type "qknorm_llama". Saving and
loading therefore need nothing but transformers' own methods.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, initialization
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from hf_qknorm.attend import functions
from hf_qknorm.families import FAMILIES, check_scheme, family_of_type, known_types
from hf_qknorm.families.class_names import PREFIX, TYPE_PREFIX, made_once
from hf_qknorm.families.style import CACHE
from hf_qknorm.files.names import REPORT
from hf_qknorm.model.accelerate_hooks import set_module_class
from hf_qknorm.model.attention import modelling_file, patched_layers
from hf_qknorm.model.config_checks import config_errors, config_file
from hf_qknorm.model.config_owners import share_backend
from hf_qknorm.model.configs import QKNormConfig, check_architectures
from hf_qknorm.model.install import install
from hf_qknorm.model.load_checks import check_loaded, check_shapes, check_stored
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.model.record import load_record, write_record
from hf_qknorm.model.tensor_parallel import plan_norms
from hf_qknorm.norms import PLAIN
from hf_qknorm.standalone.generate import set_auto_map

if TYPE_CHECKING:  # mixins precede a model's own class and use its methods
    from transformers import PreTrainedModel as _Model
else:
    _Model = object


# Class methods that read a class's module: of custom code, transformers initialises fewer buffers, for example.
ANSWERED_BY_BASE: Final = ("is_custom_code", "_can_set_attn_implementation", "_can_set_experts_implementation")


class CountsCached(_Model):
    """A mixin for a model class that, without `position_ids`, numbers the tokens of each call from 0."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model's own forward, with positions that continue those in the cache if none are given."""
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        cache = kwargs.pop(CACHE, past_key_values)
        if position_ids is None and cache is not None and tokens is not None:
            position_ids = (torch.arange(tokens.shape[1], device=tokens.device) + cache.get_seq_length())[None]
        return super().forward(input_ids, attention_mask, position_ids, cache, inputs_embeds, **kwargs)


class QKNormModel(_Model):
    """A mixin for model classes that builds the patched layers, and refuses backends and weights that don't fit."""

    base_class: ClassVar[type[PreTrainedModel]]
    config: Any
    _supports_attention_backend = True  # servers may register attention functions of their own

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        model_type = getattr(type(config), "base_model_type", None)
        if model_type is None:
            raise TypeError(
                f"{type(self).__name__} takes a {self.config_class.__name__}, got a {type(config).__name__}: make one "
                f"with qk_norm=SCHEME, or patch a {self.base_class.__name__} with patch_model"
            )
        scheme = config.scheme
        check_scheme(model_type, config, scheme)
        with config_errors(config_file(config), config.model_type, config.architectures):
            super().__init__(config, *args, **kwargs)
            use_derived_classes(self)
            install(self, family_of_type(model_type), scheme)
        plan_norms(self)
        # vLLM drops each weight that one of these matches anywhere: GPT-2's "attn.bias" is in c_attn.bias too.
        unread: Any = getattr(self, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._keys_to_ignore_on_load_unexpected = {rf"(^|\.){x}" if x[:1].isalpha() else x for x in unread}

    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, HeadNorm):
            super()._init_weights(module)
            return
        for parameter, value in ((module.weight, module.initial_gain), (module.bias, 0.0)):
            if parameter is not None:
                initialization.constant_(parameter, value)  # no effect on parameters from a checkpoint
        initialization.copy_(module.knee, torch.tensor(PLAIN))

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Check a backend as transformers does, and refuse one that would drop a cap."""
        softcap = self.config.scheme.softcap
        if softcap is not None:
            requested_attention = functions.cap_backend(
                requested_attention, softcap, self.config, own_forward=self.config.runs_own_forward
            )
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    def set_attn_implementation(self, attn_implementation: str | dict[str, str], *args: Any, **kwargs: Any) -> None:
        """Set a backend as transformers does, also in models inside it that have a copy of the config."""
        super().set_attn_implementation(attn_implementation, *args, **kwargs)
        share_backend(self)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Begin as transformers does, for `generate_batch` too, whose worker thread would hide an error.

        Raises ValueError for an encoder-decoder, and for a cap, which a paged cache would drop.
        """
        capped = next((layer.softcap for layer in patched_layers(self).values() if layer.softcap is not None), None)
        reason = None if capped is None else f"it drops the cap on the attention logits (softcap={capped:g})"
        if self.config.is_encoder_decoder:
            reason = "it runs no encoder for the decoder to attend to"
        if reason is not None:
            raise ValueError(
                f"continuous batching can't run {type(self).__name__}: {reason}. Call generate instead, with a batch "
                "of padded prompts"
            )
        return super().init_continuous_batching(*args, **kwargs)

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Make it as transformers does, which knows a model for Gemma 4's assistant by the name of its class."""
        shown = copy.copy(self)
        shown.__class__ = self.base_class
        return shown._get_candidate_generator(*args, **kwargs)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save as transformers does, with the report of a calibration; a push includes the stand-alone code."""
        if push_to_hub:
            set_auto_map(self.config)
        adapter_alone = getattr(self, "_hf_peft_config_loaded", False)
        if self.should_save_on_this_rank(is_main_process) and not adapter_alone:
            write_record(self, Path(save_directory))
        kwargs |= {"is_main_process": is_main_process, "state_dict": state_dict, "push_to_hub": push_to_hub}
        super().save_pretrained(save_directory, **kwargs)

    def _upload_modified_files(
        self, working_dir: str | os.PathLike[str], repo_id: str, files_timestamps: dict[str, float], **kwargs: Any
    ) -> Any:
        """Upload the files of a save as transformers does, and the report, which was written before it began."""
        files_timestamps.pop(REPORT, None)
        return super()._upload_modified_files(working_dir, repo_id, files_timestamps, **kwargs)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> str:
        """Push as transformers does, with the stand-alone code."""
        set_auto_map(self.config)
        return super().push_to_hub(*args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: transformers would save this class's file alone; the config saves the stand-alone code."""

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as transformers does, with the report. Raises ValueError if the scheme and the weights disagree."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        check_loaded(model, info["missing_keys"], info["unexpected_keys"])
        check_architectures(model.config)
        for layer in patched_layers(model).values():
            layer.removed_norm = ()  # a checkpoint does not hold it
        load_record(model, args[0] if args else kwargs.get("pretrained_model_name_or_path"), kwargs)
        return (model, info) if output_loading_info else model

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Load as transformers does; check dtypes before they are cast, and shapes before transformers does."""
        check_stored(model, state_dict, checkpoint_files)
        info, index = super()._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        check_shapes(model, info.mismatched_keys, others=not load_config.ignore_mismatched_sizes)
        return info, index


def use_derived_classes(model: PreTrainedModel) -> None:
    """Change `model` and the models of a family inside it, such as its base model, to derived classes, in place."""
    for module in model.modules():
        base: Any = type(module)
        model_type = getattr(getattr(base, "config_class", None), "model_type", None)
        of_type = model_type in FAMILIES or model_type == model.config.base_model_type
        if of_type and isinstance(module, PreTrainedModel) and not isinstance(module, QKNormModel):
            set_model_class(module, derived_model(base))


def set_model_class(model: PreTrainedModel, cls: type[PreTrainedModel]) -> None:
    """Set a model's class, and register its recordable outputs (`output_hidden_states`) for that class."""
    set_module_class(model, cls)
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(cls), model._can_record_outputs)


@made_once
def derived_config(model_type: str) -> type[PretrainedConfig]:
    """Return the derived config class of a model type: `QKNormLlamaConfig` for "llama"."""
    base = getattr(transformers, CONFIG_MAPPING_NAMES[model_type])
    fields: dict[str, Any] = dict.fromkeys(("qk_norm", "qk_norm_base"), Any)
    if not hasattr(base, "attn_logit_softcapping"):
        fields["attn_logit_softcapping"] = float | None
    namespace: dict[str, Any] = {
        "__annotations__": fields,
        **dict.fromkeys(fields),  # None by default
        "__module__": __name__,
        "model_type": f"{TYPE_PREFIX}{model_type}",
        "base_model_type": model_type,
        "auto_map": MappingProxyType({}),  # TRL reads it; `set_auto_map` gives a config its own
    }
    return type(f"{PREFIX}{base.__name__}", (QKNormConfig, base), namespace)


@made_once
def derived_model(base: Any) -> type[PreTrainedModel]:
    """Return the derived class of a model class: `QKNormLlamaForCausalLM` for `LlamaForCausalLM`."""
    model_type = base.config_class.model_type
    config_class = derived_config(model_type)
    init = wraps(base.__init__)(lambda *args, **kwargs: QKNormModel.__init__(*args, **kwargs))  # the base's parameters
    namespace = {"base_class": base, "config_class": config_class, "__init__": init, "__module__": __name__}
    namespace |= {name: getattr(base, name) for name in ANSWERED_BY_BASE}
    counts = (CountsCached,) if family_of_type(model_type).restarts == base.__name__ else ()
    derived = type(f"{PREFIX}{base.__name__}", (QKNormModel, *counts, base), namespace)
    # Checkpoints hold Mixtral's experts apart, and GPT-NeoX's head under another name: convert them as the base does.
    for own, name in ((model_type, config_class.model_type), (base.__name__, derived.__name__)):
        if (conversion := get_checkpoint_conversion_mapping(own)) is not None:
            register_checkpoint_conversion_mapping(name, conversion, overwrite=True)
    return derived


def __getattr__(name: str) -> Any:
    """Return the derived class `name`, as for pickles and Auto classes. Raises AttributeError if there is none."""
    base: Any = _base_class(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
    model_type = getattr(getattr(base, "config_class", base), "model_type", None)
    if model_type in known_types():
        return derived_config(model_type) if issubclass(base, PretrainedConfig) else derived_model(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _base_class(name: str) -> Any:
    """Return the class `name` of transformers, or of the user's own, or None.

    Models inside others, as BART's encoder, are in their file alone.
    """
    if (found := getattr(transformers, name, None)) is not None:
        return found
    types = (t for t in known_types() if name.startswith(CONFIG_MAPPING_NAMES[t].removesuffix("Config")))
    found = next((vars(file)[name] for file in map(modelling_file, types) if file and name in vars(file)), None)
    return found or next((cls for cls in _subclasses(PreTrainedModel) if cls.__name__ == name), None)


def _subclasses(cls: Any) -> Iterator[Any]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
