"""Importing the package: quiet, without heavy packages, and with every public name."""

from __future__ import annotations

import ast
import inspect
import pickle
from importlib import import_module
from pathlib import Path

import pytest

import hf_qknorm
from qknorm_tests.children import child
from qknorm_tests.slow import slow_but

HEAVY = (
    "accelerate", "bitsandbytes", "datasets", "matplotlib", "peft", "torch._dynamo", "transformers.modeling_utils",
    "transformers.trainer", "triton",
)  # fmt: skip

ORDERS = (
    "hf_qknorm",
    "hf_qknorm, transformers.modeling_utils",
    "transformers.modeling_utils, hf_qknorm",
    "transformers.masking_utils, hf_qknorm",
    "hf_qknorm.patch",
)


@pytest.mark.costly
def test_the_import_prints_nothing_and_loads_no_heavy_module(tmp_path):
    """Beyond those that transformers' Auto classes load, which differ by its version."""
    script = (
        "import sys, transformers.models.auto.modeling_auto, transformers.models.auto.tokenization_auto\n"
        "before = set(sys.modules)\n"
        "import hf_qknorm\n"
        f"print([name for name in {HEAVY} if name in sys.modules and name not in before])\n"
    )
    assert child(script, home=tmp_path, quiet=True) == "[]\n"


@pytest.mark.costly
@pytest.mark.parametrize("first", slow_but(["transformers.modeling_utils, hf_qknorm"], ORDERS))
def test_attention_functions_and_masks_are_registered_in_any_order(tmp_path, first):
    script = (
        f"import {first}\n"
        "from transformers import AttentionInterface, AttentionMaskInterface\n"
        "names = ('hf_qknorm', 'hf_qknorm_triton', 'hf_qknorm_cpu', 'hf_qknorm_tiled', 'hf_qknorm_eager')\n"
        "print(all(name in AttentionInterface() and name in AttentionMaskInterface() for name in names))\n"
    )
    assert child(script, home=tmp_path) == "True\n"


@pytest.mark.parametrize("compiled", slow_but([True], [False, True]))
def test_an_unpatched_model_uses_a_backend_of_the_package(compiled, tmp_path):
    script = (
        "import torch, hf_qknorm\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "config = LlamaConfig(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1,\n"
        "                     num_attention_heads=2, num_key_value_heads=2)\n"
        "torch.manual_seed(0)\n"
        "model, ids = LlamaForCausalLM(config), torch.arange(8)[None]\n"
        "model.set_attn_implementation('hf_qknorm_tiled')\n"
        f"run = torch.compile(model, fullgraph=True, backend='eager') if {compiled} else model\n"
        "before = run(ids).logits\n"
        "model.set_attn_implementation('eager')\n"
        "print(torch.allclose(model(ids).logits, before, atol=1e-6))\n"
    )
    assert child(script, home=tmp_path) == "True\n"


def test_names_that_load_when_first_used_are_those_that_type_checkers_see():
    tree = ast.parse(Path(hf_qknorm.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {node.module: tuple(alias.name for alias in node.names) for node in block.body}
    assert seen == {f"hf_qknorm.{module}": names for module, names in hf_qknorm._LATE.items()}


@pytest.mark.slow
def test_names_that_load_when_first_used_are_the_modules_own(tmp_path):
    names = [(module, name) for module, names in hf_qknorm._LATE.items() for name in names]
    for module, name in names:
        assert getattr(hf_qknorm, name) is getattr(import_module(f"hf_qknorm.{module}"), name)
    listed = "import hf_qknorm\nprint(set(hf_qknorm.__all__) <= set(dir(hf_qknorm)))\n"
    starred = "from hf_qknorm import *\nprint(QKClip.__module__, set_blend.__module__)\n"
    assert child(listed + starred, home=tmp_path) == "True\nhf_qknorm.training.clip hf_qknorm.training.blend\n"


def test_public_names_resolve_and_pickle_by_reference():
    for value in (getattr(hf_qknorm, name) for name in hf_qknorm.__all__):
        if inspect.isclass(value) or inspect.isfunction(value):
            assert pickle.loads(pickle.dumps(value)) is value


def test_an_unknown_name_raises_as_in_any_module():
    with pytest.raises(AttributeError, match="^module 'hf_qknorm' has no attribute 'QKClipper'$"):
        _ = hf_qknorm.QKClipper
