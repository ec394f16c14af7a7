"""The dotted names that stand-alone files and pickles use, which later versions must keep (standalone/README.md)."""

import io
import pickle
import pickletools
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from hf_qknorm import patch_model, standalone
from hf_qknorm.model import attention, derived
from hf_qknorm.standalone.generate import auto_map, standalone_code
from hf_qknorm.standalone.runtime import DERIVED
from qknorm_tests.tables import sharp_model

README = Path(standalone.__file__).with_name("README.md")


def pickled_names(value: Any) -> set[str]:
    """Return the names of the package that a pickle of `value` imports, as module.name."""
    stream = io.BytesIO(pickle.dumps(value, protocol=2))  # protocol 2 writes each name as one GLOBAL
    names = [argument for opcode, argument, _ in pickletools.genops(stream) if opcode.name == "GLOBAL"]
    return {name.replace(" ", ".") for name in names if name.startswith("hf_qknorm")}


NAMES = {
    "hf_qknorm.model.attention.QKNormGPT2Attention",
    "hf_qknorm.model.derived.QKNormGPT2Config",
    "hf_qknorm.model.derived.QKNormGPT2LMHeadModel",
    "hf_qknorm.model.derived.QKNormGPT2Model",
    "hf_qknorm.model.fold.FoldedNorm",
    "hf_qknorm.model.in_memory.InMemoryName",
    "hf_qknorm.model.norms.HeadNorm",
    "hf_qknorm.scheme.Scheme",
}


def test_names_in_a_pickled_model():
    assert pickled_names(patch_model(sharp_model("gpt2"), "qkv_norm")) == NAMES
    for name in (*NAMES, "hf_qknorm.model.derived.QKNormBartEncoder"):
        module, _, of = name.rpartition(".")
        assert isinstance(getattr(import_module(module), of), type)
        assert f"`{module}." in README.read_text(encoding="utf-8")


def test_an_unknown_name_raises_attribute_error():
    for module in (derived, attention):
        assert not hasattr(module, "QKNormNoSuchModel")


def test_a_generated_file_names_the_derived_classes_alone():
    """A stand-alone file imports one module of the package, which holds the derived classes."""
    assert DERIVED == "hf_qknorm.model.derived"
    code = standalone_code("llama")
    assert f'DERIVED: Final = "{DERIVED}"' in code
    assert not re.search(r"^\s*(from|import) hf_qknorm", code, re.MULTILINE)
    assert 'package = installed_package("QKNormLlamaConfig")' in code
    assert auto_map("llama")["AutoModelForCausalLM"] == "modeling_qknorm.QKNormLlamaForCausalLM"
