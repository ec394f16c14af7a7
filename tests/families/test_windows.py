"""Windows that some models use and others ignore: a patched layer computes the same as its model's eager attention."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_qknorm import FAMILIES, patch_model
from hf_qknorm.families.family import nowhere
from qknorm_tests.tables import causal_families, chosen, sharp_model
from qknorm_tests.tiny import tiny_config

BACKENDS = ("hf_qknorm", "hf_qknorm_eager", "hf_qknorm_tiled")
LENGTH = 12
# Under these names alone their configs switch windows on.
SWITCHES: dict[str, dict[str, Any]] = {
    "minimax": {"sliding_window": 4},
    "qwen3": {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {"use_sliding_window": True},
    "recurrent_gemma": {"attention_window_size": 4},
}
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
IGNORED: list[tuple[str, dict[str, Any]]] = [
    ("llama", BOTH),
    ("llama", {"use_sliding_window": True, "max_window_layers": 0}),
    ("llama", {"attention_chunk_size": 4}),
    ("llama", {"attn_logit_softcapping": 0.5}),
    ("gemma3_text", {"attn_logit_softcapping": 0.5}),
    ("qwen2", {"use_sliding_window": False}),
    ("qwen2", {"max_window_layers": 2}),
    ("mistral", {"attention_chunk_size": 4}),
    ("olmoe", {}),
]
OBEYED: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"max_window_layers": 0}),
    ("llama4_text", {"attention_chunk_size": 4, "sliding_window": 2}),
    ("llama", {"is_causal": False}),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One family of each way to have a window and some without."""
    if "model_type" in metafunc.fixturenames and metafunc.function is test_a_window_in_the_config:
        first = {FAMILIES[x].slides: x for x in reversed(causal_families()) if FAMILIES[x].slides != nowhere}
        few = [*first.values(), "bert", "gpt2", "gpt_neox", "llama", "phimoe", "qwen2_moe"]
        metafunc.parametrize("model_type", chosen(metafunc.config, few, causal_families()))


def assert_same(model_type: str, settings: dict[str, Any], other: dict[str, Any], differs: bool) -> None:
    """Fail unless a model of these settings, patched with "none", computes what its own eager attention does.

    That differs from what it computes with the `other` settings, or does not.
    """
    tokens = torch.arange(3, 3 + LENGTH)[None]
    expected, without = (eager(model_type, x)(input_ids=tokens).logits for x in (settings, other))
    assert torch.equal(expected, without) != differs
    model = patch_model(eager(model_type, settings), "none")
    for backend in BACKENDS:
        model.set_attn_implementation(backend)
        torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-4, msg=backend)


def eager(model_type: str, settings: dict[str, Any]) -> PreTrainedModel:
    model = sharp_model(model_type, **settings)
    model.set_attn_implementation("eager")
    return model


@torch.no_grad()
def test_a_window_in_the_config(model_type):
    """The family decides whether the model uses a window, whatever its config holds."""
    settings = SWITCHES.get(model_type, {})
    names = [name for name in settings if "window_size" in name] or ["sliding_window"]
    narrow, wide = ({**settings, **dict.fromkeys(names, n)} for n in (4, 64))
    assert_same(model_type, narrow, wide, differs=FAMILIES[model_type].slides is not nowhere)


@pytest.mark.parametrize(("model_type", "settings"), IGNORED, ids=str)
@torch.no_grad()
def test_a_setting_that_the_model_ignores(model_type, settings):
    own = {"sliding_window": 4} if "sliding_window" not in vars(tiny_config(model_type)) else {}
    plain = {**own, "use_sliding_window": False} if model_type == "qwen2" else {}
    assert_same(model_type, {**own, **settings}, plain, differs=False)


@pytest.mark.parametrize(("model_type", "settings"), OBEYED, ids=str)
@torch.no_grad()
def test_a_setting_that_the_model_obeys(model_type, settings):
    assert_same(model_type, settings, {}, differs=True)


@pytest.mark.parametrize("model_type", ["gemma2", "phimoe", "qwen2_moe"])
@torch.no_grad()
def test_a_window_of_an_unpatched_model(model_type):
    """The model's masks contain the window; its layers may pass on another one."""
    tokens = torch.arange(3, 3 + LENGTH)[None]
    model = sharp_model(model_type, sliding_window=4)
    model.set_attn_implementation("eager")
    expected = model(input_ids=tokens).logits
    for backend in BACKENDS:
        model.set_attn_implementation(backend)
        torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-4, msg=backend)
