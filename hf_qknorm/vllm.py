"""vLLM's plugin: where hf_qknorm is installed, patched checkpoints are served without `trust_remote_code`."""

from __future__ import annotations

from typing import Final

from transformers import CONFIG_MAPPING
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_qknorm.families import known_types
from hf_qknorm.families.class_names import PREFIX

BACKEND: Final = "vllm.model_executor.models.transformers:Transformers"
EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def register() -> None:
    """Let vLLM run each patched causal language model by its backend for transformers models."""
    from vllm import ModelRegistry

    for model_type in known_types():
        if (name := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)) is not None:
            config = CONFIG_MAPPING[model_type]
            kind = "MoE" if any(getattr(config, setting, None) for setting in EXPERTS) else ""
            ModelRegistry.register_model(f"{PREFIX}{name}", f"{BACKEND}{kind}ForCausalLM")
            if (conversion := get_checkpoint_conversion_mapping(name)) is not None:  # vLLM builds the base model alone
                register_checkpoint_conversion_mapping(f"{PREFIX}{name}", conversion, overwrite=True)
