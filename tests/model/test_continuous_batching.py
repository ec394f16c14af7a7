"""transformers' continuous batching gives the tokens of `generate`, or is refused before it starts."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from hf_qknorm import SCHEMES, Scheme, patch_model
from hf_qknorm.families.style import FROM_5_24
from qknorm_tests.covering import covering
from qknorm_tests.slow import slow_but
from qknorm_tests.tables import applies, randomise, sharp_model
from qknorm_tests.tiny import tiny_config

NEW = 6
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
PROMPTS = [[(7 * i + n) % 60 + 3 for i in range(n)] for n in (5, 2, 14, 1)]  # the window is 8
TRIED = {name: scheme for name, scheme in SCHEMES.items() if scheme.softcap is None} | {
    "knee": Scheme(q="auto", k="auto", v="auto")
}
TYPES = ("gpt2", "gpt_neox", "llama", "mistral")


def fits(model_type: str, scheme: str, backend: str) -> bool:
    """GPT-NeoX's own attention fails with transformers 5.24."""
    return applies(model_type, TRIED[scheme]) and not (FROM_5_24 and (model_type, scheme) == ("gpt_neox", "none"))


def model_of(model_type: str, scheme: str | Scheme, backend: str | None) -> PreTrainedModel:
    model = sharp_model(model_type)
    if model_type in ("gpt2", "gpt_neox"):  # their own configs lack it, and all heads have keys
        vars(model.config).pop("num_key_value_heads", None)
    return randomise(patch_model(model, scheme, attn_implementation=backend))


def tokens_of(model: PreTrainedModel, config: ContinuousBatchingConfig | None = None) -> list[list[int]]:
    config = config or ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64)
    results = model.generate_batch(
        inputs=PROMPTS, generation_config=GenerationConfig(**GREEDY), continuous_batching_config=config, warmup=False
    ).values()
    assert [result.error for result in results] == [None] * len(PROMPTS)
    return [result.generated_tokens for result in results]


WAYS = covering(TYPES, TRIED, ["sdpa", "eager"], fits=fits, strength=1)


@pytest.mark.costly
@pytest.mark.parametrize(("model_type", "scheme", "backend"), slow_but(WAYS[: len(TYPES)], WAYS))
def test_it_gives_the_tokens_of_generate(model_type: str, scheme: str, backend: str) -> None:
    model = model_of(model_type, TRIED[scheme], backend)
    expected = [model.generate(torch.tensor([x]), **GREEDY)[0, len(x) :].tolist() for x in PROMPTS]
    assert len({token for tokens in expected for token in tokens}) >= len(PROMPTS)  # else a wrong mask may not show
    assert tokens_of(model) == expected
    assert model.config._attn_implementation == backend


@pytest.mark.parametrize(
    ("model_type", "scheme", "backend", "message"),
    [
        ("llama", "soft_cap", "eager", r"drops the cap on the attention logits \(softcap=50\)"),
        ("llama", "qk_norm_cap", "hf_qknorm", "drops the cap"),
        ("gemma2", "qk_norm", "eager", "drops the cap"),  # its own
        ("llama", "qk_norm", "hf_qknorm", "hf_qknorm.* is not supported"),
    ],
)
def test_it_is_refused_before_it_starts(model_type: str, scheme: str, backend: str, message: str) -> None:
    model = model_of(model_type, scheme, backend)
    with pytest.raises(ValueError, match=message):
        model.init_continuous_batching(generation_config=GenerationConfig(**GREEDY))
    assert model.config._attn_implementation == backend
    encoder_decoder = patch_model(AutoModelForSeq2SeqLM.from_config(tiny_config("bart")), "soft_cap")
    with pytest.raises(ValueError, match="BartForConditionalGeneration: it runs no encoder"):
        encoder_decoder.init_continuous_batching()


def test_a_capped_layer_names_the_way_out() -> None:
    """As in a multimodal model, whose own class checks nothing."""
    model = model_of("llama", "qk_norm_cap", None)
    with pytest.raises(ValueError, match="a paged cache .* call generate"):
        model(torch.tensor([PROMPTS[0]]), **{"block_table" if FROM_5_24 else "cache": object()})
