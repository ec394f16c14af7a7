"""Generation with each kind of cache gives the tokens of full passes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, PreTrainedModel

from hf_qknorm import SCHEMES, patch_model
from qknorm_tests.covering import covering
from qknorm_tests.tables import MODEL_TYPES, applies, assert_near, make_batch, randomise, sharp_model

NEW = 12  # prompt and new tokens pass the window of 8
SCHEMES_TESTED = {
    "norm": SCHEMES["qk_norm"],
    "norm and cap": replace(SCHEMES["qk_norm_cap"], softcap=2.0),
    "cap": replace(SCHEMES["soft_cap"], softcap=2.0),
}
MODELS = covering(MODEL_TYPES, SCHEMES_TESTED, fits=lambda t, name: applies(t, SCHEMES_TESTED[name]), strength=1)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    model_type, scheme = request.param
    return randomise(patch_model(sharp_model(model_type), SCHEMES_TESTED[scheme]))


def generate(
    model: PreTrainedModel, kind: str = "plain", rows: slice = slice(None), last: int = 0, **options: Any
) -> Any:
    """Greedy or beam search from a batch, or from the `last` tokens of each of its rows."""
    batch = {name: tensor[rows, -last:] for name, tensor in make_batch(kind, labels=False).items()}
    lengths = {"max_new_tokens": NEW, "min_new_tokens": NEW}
    return model.generate(
        **batch, **lengths, do_sample=False, return_dict_in_generate=True, output_logits=True, **options
    )


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # the batch, and options
    "static": ({"kind": "left"}, {"cache_implementation": "static"}),
    "static, a few tokens": ({"last": 5}, {"cache_implementation": "static"}),
    "dynamic, one token": ({"last": 1}, {}),
    "beams": ({"kind": "left"}, {"num_beams": 3}),
    "beams, static": ({"kind": "left"}, {"num_beams": 3, "cache_implementation": "static"}),
    "guesses, of which wrong ones leave the cache": ({"rows": slice(1)}, {"prompt_lookup_num_tokens": 3}),
}


@pytest.mark.parametrize(("model", "way"), covering(MODELS, WAYS, strength=1), indirect=["model"], ids=str)
def test_cached_generation(model, way):
    batch, options = WAYS[way]
    beams = {name: value for name, value in options.items() if name == "num_beams"}
    expected, actual = generate(model, **batch, **beams, use_cache=False), generate(model, **batch, **options)
    assert torch.equal(actual.sequences, expected.sequences)
    if "num_beams" not in options and "prompt_lookup_num_tokens" not in options:
        for step, logits in enumerate(expected.logits):
            assert_near(actual.logits[step], logits, 1e-5, f"step {step}")


def test_the_assistant_of_gemma_4_knows_a_capped_model():
    """transformers knows the model by the name of its class."""
    model = patch_model(sharp_model("gemma4_text"), SCHEMES_TESTED["cap"])
    small = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4}
    config = Gemma4AssistantConfig(text_config=model.config.base().to_dict() | small, backbone_hidden_size=64)
    assistant = Gemma4AssistantForCausalLM(config).eval()
    assistant.generation_config.num_assistant_tokens = 2
    expected, actual = (generate(model, rows=slice(1), assistant_model=x) for x in (None, assistant))
    assert torch.equal(actual.sequences, expected.sequences)
