"""What is registered in other libraries, in whatever order they are imported, and the variable that leaves it out."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from qknorm_tests.children import child
from qknorm_tests.slow import slow_but

ORDERS = (
    "peft.utils.constants, transformers.masking_utils, hf_qknorm",
    "hf_qknorm, transformers, peft",
    "hf_qknorm.attend.masks, peft",
)
SCRIPT = """
import sys, {imports}
from importlib import reload
from transformers import AttentionInterface, AttentionMaskInterface
from peft.utils import constants
names = ("hf_qknorm", "hf_qknorm_triton", "hf_qknorm_cpu", "hf_qknorm_tiled", "hf_qknorm_eager")
print(all(name in AttentionInterface() and name in AttentionMaskInterface() for name in names))
tables = [table for name, table in vars(constants).items() if name.startswith("TRANSFORMERS_MODELS_TO_")]
print(sum("llama" in table for table in tables) > 1)
print(all(table.get("qknorm_llama") == table.get("llama") for table in tables))
print("qknorm_llama" in reload(constants).TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING)
"""
LIGER = """
from hf_qknorm.families import known_families
assert "liger_kernel" not in sys.modules
from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as table
print(all(f"qknorm_{name}" in table for name in known_families()))
"""
LEFT_OUT = """
import hf_qknorm, peft, transformers
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
functions = [PretrainedConfig.__post_init__, PreTrainedModel.from_pretrained, peft.config.PeftConfigMixin.to_dict]
print(sum(hasattr(function, "hf_qknorm_hook") for function in functions))
print("qknorm_llama" in peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING)
print("qknorm_llama" in transformers.CONFIG_MAPPING, "hf_qknorm" in AttentionInterface())
"""


@pytest.mark.costly
@pytest.mark.parametrize("imports", slow_but(ORDERS[:1], ORDERS))
def test_tables_of_other_libraries_are_filled_in_any_order(imports, tmp_path):
    script, lines = SCRIPT.format(imports=imports), 4
    if find_spec("liger_kernel"):
        script, lines = script + LIGER, 5
    assert child(script, home=tmp_path) == "True\n" * lines


@pytest.mark.slow
def test_the_variable_leaves_what_patched_models_need(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_QKNORM_HOOKS", "0")
    assert child(LEFT_OUT, home=tmp_path) == "0\nFalse\nTrue True\n"
