"""The scheme "none" changes nothing, bit for bit: the proof that a family projects, rotates and joins as its model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_qknorm import FAMILIES, patch_model
from qknorm_tests.covering import covering
from qknorm_tests.tables import (
    BATCHES,
    MODEL_TYPES,
    assert_identical,
    make_batch,
    sharp_model,
    step,
)

ROTARY = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{model_type: (model_type, {"attention_dropout": 0.1}) for model_type in MODEL_TYPES},
    "gpt2": ("gpt2", {}),  # its dropout is 0.1 as it comes
    "gpt2-inverse-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-unscaled": ("gpt2", {"scale_attn_weights": False}),
    "gpt2-upcast": ("gpt2", {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox-partial": ("gpt_neox", {"rope_parameters": ROTARY, "use_parallel_residual": True}),
    "gpt_neox-sequential": ("gpt_neox", {"rope_parameters": ROTARY, "use_parallel_residual": False}),
    "gpt_neox-no-bias": ("gpt_neox", {"attention_bias": False, "attention_dropout": 0.1}),
    "llama-bias": ("llama", {"attention_bias": True}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "mixtral-full": ("mixtral", {"sliding_window": None}),
    "phi3-partial": ("phi3", {"rope_parameters": {**ROTARY, "partial_rotary_factor": 0.5}}),
    "qwen2-full": ("qwen2", {"use_sliding_window": False}),
    "gemma2-uncapped": ("gemma2", {"attn_logit_softcapping": None}),
}


def backends(model_type: str, settings: dict[str, Any]) -> tuple[str, ...]:
    """Those that the base model itself supports; GPT-2's upcasting is a branch of "eager" alone."""
    if FAMILIES[model_type].own_cap or "reorder_and_upcast_attn" in settings:
        return ("eager",)
    return ("sdpa", "eager")


RUNS = [(case, backend) for case, (model_type, settings) in CASES.items() for backend in backends(model_type, settings)]
ON_BATCHES = covering(RUNS, BATCHES, strength=1)


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same model twice: as it comes, and patched with the scheme "none"."""
    case, backend = request.param
    model_type, settings = CASES[case]
    original, patched = (sharp_model(model_type, **settings) for _ in range(2))
    for model in (original, patched):
        model.set_attn_implementation(backend)
    return original, patch_model(patched, "none")


@pytest.mark.parametrize(("pair", "kind"), ON_BATCHES, indirect=["pair"], ids=str)
def test_training_step(pair, kind):
    original, patched = pair
    assert patched.config._attn_implementation == original.config._attn_implementation
    batch = make_batch(kind)
    assert_identical(step(patched, batch), step(original, batch))


@torch.no_grad()
def test_inference_in_bfloat16(pair):
    """The position of casts matters in half precision only: GPT-2's upcasting, a softmax in fp32."""
    expected, actual = (copy.deepcopy(model).to(torch.bfloat16)(**make_batch("left")).logits for model in pair)
    assert torch.equal(actual, expected)
