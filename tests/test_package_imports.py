"""Importing the package: quiet, without heavy packages, and with every public name; PEFT before it or after it."""

from __future__ import annotations

import ast
import inspect
import pickle
from importlib import import_module
from pathlib import Path

import pytest
from children import child

import hf_qknorm

REGISTERED = "from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer\n"
HEAVY = ("peft", "bitsandbytes", "matplotlib", "datasets", "transformers.trainer", "transformers.trainer_callback")


def test_the_import_prints_nothing_and_loads_no_heavy_module(tmp_path):
    script = f"import sys, hf_qknorm\nprint([name for name in {HEAVY} if name in sys.modules])\n"
    assert child(script, home=tmp_path, quiet=True) == "[]\n"


def test_the_import_loads_no_package_beyond_those_of_transformers_own_registries(tmp_path):
    """transformers' own modules for attention functions and Auto classes load accelerate, Triton and dynamo."""
    script = (
        f"import sys\n{REGISTERED}"
        "before = {name.partition('.')[0] for name in sys.modules}\n"
        "import hf_qknorm\n"
        "loaded = {name.partition('.')[0] for name in sys.modules} - before - sys.stdlib_module_names\n"
        "print(sorted(name for name in loaded if not name.startswith('__editable__')))\n"
    )
    assert child(script, home=tmp_path) == "['hf_qknorm']\n"


def test_names_that_load_when_first_used_are_those_that_type_checkers_see():
    tree = ast.parse(Path(hf_qknorm.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {node.module: tuple(alias.name for alias in node.names) for node in block.body}
    assert seen == {f"hf_qknorm.training.{module}": names for module, names in hf_qknorm._CALLBACKS.items()}


def test_names_that_load_when_first_used_are_the_modules_own(tmp_path):
    names = [(module, name) for module, names in hf_qknorm._CALLBACKS.items() for name in names]
    for module, name in names:
        assert getattr(hf_qknorm, name) is getattr(import_module(f"hf_qknorm.training.{module}"), name)
    listed = "import hf_qknorm\nprint(set(hf_qknorm.__all__) <= set(dir(hf_qknorm)))\n"
    starred = "from hf_qknorm import *\nprint(QKClip.__module__, set_blend.__module__)\n"
    assert child(listed + starred, home=tmp_path) == "True\nhf_qknorm.training.clip hf_qknorm.training.blend\n"


@pytest.mark.parametrize("name", hf_qknorm.__all__)
def test_public_names_resolve_and_pickle_by_reference(name):
    value = getattr(hf_qknorm, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert pickle.loads(pickle.dumps(value)) is value


def test_an_unknown_name_raises_as_in_any_module():
    with pytest.raises(AttributeError, match="^module 'hf_qknorm' has no attribute 'QKClipper'$"):
        _ = hf_qknorm.QKClipper


@pytest.mark.parametrize("first", ["hf_qknorm, peft", "peft, hf_qknorm", "peft.utils.constants, hf_qknorm"])
def test_peft_knows_the_targets_of_patched_models_in_either_order(tmp_path, first):
    script = (
        f"import sys, {first}\n"
        "from peft.utils import constants\n"
        "tables = [table for name, table in vars(constants).items() if name.startswith('TRANSFORMERS_MODELS_TO_')]\n"
        "print(sum('llama' in table for table in tables) > 1)\n"
        "print(all(table.get('qknorm_llama') == table.get('llama') for table in tables))\n"
        "import importlib\n"
        "print('qknorm_llama' in importlib.reload(constants).TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING)\n"
    )
    assert child(script, home=tmp_path) == "True\nTrue\nTrue\n"
