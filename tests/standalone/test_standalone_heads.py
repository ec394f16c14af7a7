"""Without the package, classifiers and taggers load too, whose base model transformers makes by its config."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from hf_qknorm import SCHEMES, patch_model
from hf_qknorm.convert.card import render_card
from hf_qknorm.standalone.generate import add_standalone
from qknorm_tests.children import child
from qknorm_tests.tables import make_batch, randomise, sharp_model
from qknorm_tests.tiny import tiny_config

IMAGES = ("DeiTForImageClassification", "DeiTForImageClassificationWithTeacher")
HEADS = ("AutoModelForSequenceClassification", "AutoModelForTokenClassification", "AutoModelForQuestionAnswering")
LOAD_HEADS = """
import sys
sys.modules["hf_qknorm"] = None
import torch, transformers
tokens = torch.load(sys.argv[1])
for folder in sys.argv[2:]:
    auto = getattr(transformers, folder.rpartition("/")[2])
    model = auto.from_pretrained(folder, trust_remote_code=True)
    assert type(model.base_model).__module__ == type(model).__module__, "the base model is the checkpoint's own too"
    with torch.no_grad():
        torch.save(model(tokens)[0], folder + "/alone.pt")
"""


@torch.no_grad()
def test_without_the_package_heads_of_every_kind_load(tmp_path):
    """Llama's classifiers make their base model by `AutoModel.from_config`; all load in one process."""
    tokens = make_batch("plain")["input_ids"][:1]
    torch.save(tokens, tmp_path / "tokens.pt")
    expected = {}
    for name in (*HEADS, "AutoModelForCausalLM"):
        model = getattr(transformers, name).from_config(sharp_model("llama").config)
        model = randomise(patch_model(model, SCHEMES["qk_norm_cap"])).eval()
        add_standalone(model)
        model.save_pretrained(tmp_path / name)
        expected[name] = model(tokens)[0]
    child(LOAD_HEADS, tmp_path / "tokens.pt", *(tmp_path / name for name in expected), home=tmp_path)
    for name, output in expected.items():
        torch.testing.assert_close(torch.load(tmp_path / name / "alone.pt"), output, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("marked", ["model", "folder"])
@pytest.mark.parametrize("name", IMAGES)
def test_each_of_two_classifiers_of_one_auto_class_is_loaded(name, marked, tmp_path):
    """The other one would have a random classifier."""
    model = patch_model(getattr(transformers, name)(tiny_config("deit")), "qk_norm")
    if marked == "model":
        add_standalone(model)
    model.save_pretrained(tmp_path)
    if marked == "folder":
        add_standalone(tmp_path)
    own, config = type(model).__name__, json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"]["AutoModelForImageClassification"] == f"modeling_qknorm.{own}"
    assert f"{own} = derived_model(" in (tmp_path / "modeling_qknorm.py").read_text()
    assert "AutoModelForImageClassification.from_pretrained" in render_card(tmp_path)
