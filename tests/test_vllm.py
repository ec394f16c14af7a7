"""The plugin registers each patched causal language model for vLLM's backend; recipes/serve runs vLLM itself."""

import sys
from types import SimpleNamespace

import pytest
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_qknorm.families import known_types
from hf_qknorm.model import derived
from hf_qknorm.vllm import register


@pytest.fixture(scope="module")
def registered() -> dict[str, str]:
    found: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        registry = SimpleNamespace(register_model=lambda name, place: found.update({name: place}))
        patch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
        register()
    return found


def test_every_causal_language_model_is_registered(registered):
    names = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) for model_type in known_types()} - {None}
    assert registered.keys() == {f"QKNorm{name}" for name in names}


def test_names_in_checkpoints_are_those_of_the_base(registered):
    """GPT-NeoX's head is stored under another name."""
    (own,) = get_checkpoint_conversion_mapping("QKNormGPTNeoXForCausalLM")
    assert (own.source_patterns, own.target_patterns) == (["^embed_out\\."], ["lm_head."])


@pytest.mark.parametrize(
    ("name", "experts"), [("Llama", False), ("Qwen2", False), ("Mixtral", True), ("Qwen3Moe", True), ("GptOss", True)]
)
def test_models_with_experts_have_another_backend(registered, name, experts):
    own = f"QKNorm{name}ForCausalLM"
    assert getattr(derived, own).__name__ == own
    kind = "MoEForCausalLM" if experts else "ForCausalLM"
    assert registered[own] == f"vllm.model_executor.models.transformers:Transformers{kind}"
