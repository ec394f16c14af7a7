"""The attention functions of the package in transformers: after any order of imports, and in models without a patch."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_qknorm  # noqa: F401
from qknorm_tests.children import child
from qknorm_tests.slow import slow_but

ORDERS = (
    "hf_qknorm",
    "transformers.modeling_utils, hf_qknorm",
    "transformers.masking_utils, hf_qknorm",
    "hf_qknorm.attend.functions",
    "hf_qknorm.attend.masks",
    "hf_qknorm.patch",
)


@pytest.mark.costly
@pytest.mark.parametrize("first", slow_but({ORDERS[1]}, ORDERS))
def test_attention_functions_and_masks_are_registered_in_any_order(tmp_path, first):
    script = (
        f"import {first}\n"
        "from transformers import AttentionInterface, AttentionMaskInterface\n"
        "names = ('hf_qknorm', 'hf_qknorm_triton', 'hf_qknorm_cpu', 'hf_qknorm_tiled', 'hf_qknorm_eager')\n"
        "print(all(name in AttentionInterface() and name in AttentionMaskInterface() for name in names))\n"
    )
    assert child(script, home=tmp_path) == "True\n"


@pytest.mark.parametrize("compiled", slow_but([True], [False, True]))
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
