"""Without the package, heads of every kind, encoders and types that take a cap alone compute the same."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from hf_qknorm import Scheme, patch_model
from hf_qknorm.convert.card import render_card
from hf_qknorm.standalone.generate import add_standalone
from qknorm_tests import vision_cases
from qknorm_tests.children import child
from qknorm_tests.tables import assert_near, make_batch, randomise, sharp_model
from qknorm_tests.tiny import tiny_config

IMAGES = ("DeiTForImageClassification", "DeiTForImageClassificationWithTeacher")
HEADS = ("AutoModelForSequenceClassification", "AutoModelForQuestionAnswering", "AutoModelForCausalLM")
ALONE = """
import sys
sys.modules["hf_qknorm"] = None  # before anything that could import it
import torch, transformers
from safetensors.torch import load_file, save_file
for argument in sys.argv[1:]:
    folder, auto = argument.rsplit(":", 1)
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules")
    assert type(model.base_model).__module__ == type(model).__module__, "the base model is the checkpoint's own too"
    with torch.no_grad():
        out = model(**load_file(f"{folder}/batch.safetensors"))[0]
    save_file({"out": out.contiguous()}, f"{folder}/alone.safetensors")
"""


def cases(every: bool) -> Iterator[tuple[str, PreTrainedModel, dict[str, Any]]]:
    """The Auto class of each model, the model, and a batch: heads of Llama, encoders, and types that take a cap alone.

    Llama's classifiers make their base model by `AutoModel.from_config`.
    """
    for auto in HEADS:
        model = getattr(transformers, auto).from_config(sharp_model("llama").config)
        yield auto, patch_model(model, "qk_norm_cap"), make_batch("plain", labels=False)
    for case in vision_cases.CASES | vision_cases.MORE if every else ("bert", "vit"):
        auto = (vision_cases.CASES | vision_cases.MORE)[case][1]
        if auto.startswith("Auto"):  # SigLIP's model of text has no Auto class
            batch = {name: x for name, x in vision_cases.batches(case)[-1].items() if name != "labels"}
            yield auto, patch_model(vision_cases.made(case), Scheme(q="rms", k="rms", softcap=5.0)), batch
    for case, (_, auto, _) in vision_cases.CAPPED.items():
        yield auto, patch_model(vision_cases.made(case), Scheme(softcap=0.5)), vision_cases.unlabelled(case)


@torch.no_grad()
def test_without_the_package_models_of_every_kind_compute_the_same(pytestconfig, tmp_path):
    """All load in one process."""
    expected, arguments = [], []
    for number, (auto, model, batch) in enumerate(cases(pytestconfig.getoption("families") != "few")):
        folder = tmp_path / str(number)
        add_standalone(randomise(model).eval())
        model.save_pretrained(folder)
        save_file({name: x.contiguous() for name, x in batch.items()}, folder / "batch.safetensors")
        expected.append(model(**batch)[0])
        arguments.append(f"{folder}:{auto}")
    child(ALONE, *arguments, home=tmp_path)
    for number, output in enumerate(expected):
        assert_near(load_file(tmp_path / str(number) / "alone.safetensors")["out"], output, 1e-5, arguments[number])


@pytest.mark.parametrize(("name", "marked"), [*zip(IMAGES, ["model", "folder"], strict=True)])
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
