"""The table of all changes to other libraries, and the environment variable that leaves most of them out."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, NamedTuple

from hf_qknorm.hooks import adapters, auto_classes, in_memory, liger, mtp, resumed_runs, unpatched_classes
from hf_qknorm.hooks.install import after_import, wrap

SWITCH: Final = "HF_QKNORM_HOOKS"


class Hook(NamedTuple):
    """A change to another library, made after the import of a module.

    `function` is called with the module. With `wraps`, it takes the place of the module's function `changes`, and gets
    the original function as its first argument. The hooks that are `needed` to load and run a patched model are
    installed with HF_QKNORM_HOOKS=0 too.
    """

    module: str
    changes: str
    function: Callable[..., Any]
    versions: str  # that need it, as a requirement
    reason: str
    wraps: bool = True
    needed: bool = False

    @property
    def name(self) -> str:
        """The full name of what is changed."""
        return f"{self.module}.{self.changes}"

    def install(self, module: Any) -> None:
        """Make the change; a second call changes nothing."""
        if self.wraps:
            wrap(module, self.changes, self.function)
        else:
            self.function(module)


def install_hooks() -> None:
    """Install the hooks: each at once if its module is imported, else after the import of it.

    HF_QKNORM_HOOKS=0 leaves the needed ones. Raises ValueError for a value that is neither 1 nor 0.
    """
    value = os.environ.get(SWITCH) or "1"
    if value not in ("0", "1"):
        raise ValueError(
            f"{SWITCH} must be 1 (all changes to other libraries) or 0 (those that patched models need), got {value!r}"
        )
    for hook in HOOKS:
        if hook.needed or value == "1":
            after_import(hook.module, hook.install)


def _add_attention_functions(modeling_utils: Any) -> None:
    import_module("hf_qknorm.attend.functions")  # which registers them at its end: it may have begun this import


HOOKS: Final = (
    Hook("transformers.models.auto.modeling_auto", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
         auto_classes.add_model_types, "transformers>=5.17", wraps=False, needed=True,
         reason="Auto classes know the derived model types; their `register` would import all model code"),
    *(Hook(f"transformers.models.auto.{kind}_auto", f"{table}_MAPPING",
           auto_classes.add_processors, "transformers>=5.17", wraps=False,
           reason="Auto classes find the processors of derived types")
      for kind, table in (("feature_extraction", "FEATURE_EXTRACTOR"), ("image_processing", "IMAGE_PROCESSOR"),
                          ("processing", "PROCESSOR"), ("video_processing", "VIDEO_PROCESSOR"))),
    Hook("transformers.integrations.awq", "AWQ_SCALES_MAPPINGS",
         lambda awq: auto_classes.add_derived(awq.AWQ_SCALES_MAPPINGS), "transformers>=5.17", wraps=False,
         reason="AWQ finds the activations of derived types"),
    Hook("transformers.modeling_utils", "AttentionInterface",
         _add_attention_functions, "transformers>=5.17", wraps=False, needed=True,
         reason="attention functions and their masks, by the `register` of both interfaces"),
    Hook("transformers.modeling_utils", "PreTrainedModel._load_pretrained_model",
         unpatched_classes.check_weights, "transformers>=5.17", needed=True,
         reason="transformers' model classes refuse a patched checkpoint, and check the norms of patched towers"),
    Hook("transformers.modeling_utils", "PreTrainedModel.save_pretrained",
         unpatched_classes.check_saved, "transformers>=5.17",
         reason="a model is not saved if its layers have another scheme than its config, as where a part is patched"),
    Hook("peft.peft_model", "PeftModel.save_pretrained", unpatched_classes.check_saved, "peft>=0.18",
         reason="an adapter of such a model is not saved: its base would load without the scheme"),
    Hook("transformers.modeling_layers", "MtpModel.__init__", mtp.build_layers, "transformers>=5.17", needed=True,
         reason="layers of multi-token prediction have the model's own norms, and not a scheme's"),
    Hook("transformers.trainer", "Trainer.train", resumed_runs.check_resumed, "transformers>=5.17",
         reason="a run is not resumed with another scheme than its checkpoint's; a lost `KneeSchedule` is named"),
    Hook("transformers.configuration_utils", "PreTrainedConfig.__post_init__",
         unpatched_classes.check_config, "transformers>=5.17",
         reason="config classes of transformers refuse the settings of a patched checkpoint"),
    Hook("transformers.modeling_utils", "PreTrainedModel.from_pretrained", in_memory.refuse_name, "transformers>=5.17",
         reason="TRL does not take the model before a change in memory as the reference model"),
    Hook("peft.utils.constants", "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING",
         adapters.add_targets, "peft>=0.18", wraps=False,
         reason="derived types have the default targets of their bases, in this table and the other methods' tables"),
    Hook("peft.utils.transformers_weight_conversion", "_MODEL_TO_CONVERSION_PATTERN",
         lambda peft: auto_classes.add_derived(peft._MODEL_TO_CONVERSION_PATTERN), "peft>=0.19", wraps=False,
         reason="adapters reach the experts of derived types, by names from before transformers 5 too"),
    Hook("peft.config", "PeftConfigMixin.to_dict", in_memory.store_no_base, "peft>=0.18",
         reason="an adapter does not name the model before a change in memory as its base"),
    Hook("peft.auto", "get_default_import_allowlist", adapters.allow_package, "peft>=0.20",
         reason="`AutoPeftModel` imports the derived class that an adapter names; otherwise each caller passes a list"),
    Hook("peft.peft_model", "set_peft_model_state_dict", adapters.keep_gains, "peft>=0.18",
         reason="an adapter with gains is refused by a model without norms, instead of losing them"),
    Hook("liger_kernel.transformers.monkey_patch", "MODEL_TYPE_TO_APPLY_LIGER_FN",
         liger.add_kernels, "liger-kernel>=0.8.5", wraps=False,
         reason="derived types have the kernels of their bases, without RoPE"),
    Hook("liger_kernel.transformers.monkey_patch", "_bind_method_to_module", liger.spare_norms, "liger-kernel>=0.8.5",
         reason="a scheme's norms stay, and a removed norm stays removed"),
    Hook("vllm.entrypoints.llm", "LLM.__init__", in_memory.refuse_name, "vllm",
         reason="TRL's trainers do not sample with the weights before a change in memory"),
    Hook("yaml", "Dumper", in_memory.write_as_string, "pyyaml>=6", wraps=False,
         reason="cards hold the name of a model that was changed in memory, by `add_representer`"),
)  # fmt: skip
