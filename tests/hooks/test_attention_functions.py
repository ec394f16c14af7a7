"""The attention functions of the package in transformers: after any order of imports, and in models without a patch."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_qknorm  # noqa: F401
from qknorm_tests.slow import slow_but


@pytest.mark.parametrize("compiled", slow_but([False], [False, True]))
@torch.no_grad()
def test_an_unpatched_model_uses_a_backend_of_the_package(compiled):
    """Nothing else here imports the functions: test_hooks.py runs this without the hook."""
    sizes = {"vocab_size": 9, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model, ids = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).eval(), torch.arange(8)[None]
    model.set_attn_implementation("hf_qknorm_tiled")
    run = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    found = run(ids).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(found, model(ids).logits, rtol=0, atol=1e-6)
