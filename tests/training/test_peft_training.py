"""Adapters and norms trained by Trainer: LoRA, DoRA and QLoRA learn, resume, load and merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from hf_qknorm import Scheme, patch_model, peft_modules_to_save
from hf_qknorm.model.derived import QKNormModel
from qknorm_tests.children import child
from qknorm_tests.short_runs import SaveAt, trainer
from qknorm_tests.tables import assert_near, make_batch, sharp_model

SCHEME = Scheme(q="rms", k="layer", v="rms", bias=True, softcap=5.0)
WIDE = {"intermediate_size": 128}  # a multiple of the blocks of 4-bit weights
KINDS: dict[str, dict[str, Any]] = {"DoRA": {"use_dora": True}, "QLoRA": {}}
FRESH = """
import sys, torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
import hf_qknorm
for folder in sys.argv[1:]:
    model = AutoPeftModelForCausalLM.from_pretrained(folder + "/adapter", device_map="cpu").eval()
    batch = load_file(folder + "/batch.safetensors")
    save_file({"logits": model(**batch).logits.detach()}, folder + "/fresh.safetensors")
"""

pytestmark = [
    pytest.mark.costly,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning"),  # peft uses the old name
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A converted checkpoint."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    folder = tmp_path_factory.mktemp("base")
    patch_model(sharp_model("llama", **WIDE), SCHEME).save_pretrained(folder)
    return folder


def loaded(kind: str, base: Path) -> PreTrainedModel:
    if kind != "QLoRA":
        return AutoModelForCausalLM.from_pretrained(base)
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=four, device_map="cpu")
    return peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})


def adapted(kind: str, base: Path) -> peft.PeftModel:
    model = loaded(kind, base)
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        modules_to_save=peft_modules_to_save(model),
        task_type="CAUSAL_LM",
        **KINDS[kind],
    )
    return peft.get_peft_model(model, config)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(**make_batch("left", labels=False)).logits


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory) -> dict[str, tuple[peft.PeftModel, Path]]:
    """By kind, a trained model, and a folder with its run, its adapter and the outputs of a new process."""
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        run = trainer(adapted(kind, base), folder)
        run.train()
        run.model.save_pretrained(folder / "adapter")
        save_file(make_batch("left", labels=False), folder / "batch.safetensors")
        found[kind] = run.model, folder
    child(FRESH, *(folder for _, folder in found.values()), home=tmp_path_factory.mktemp("home"))
    return found


def trained_norms(model: peft.PeftModel) -> dict[str, Tensor]:
    return {n: p for n, p in model.named_parameters() if "_norm.modules_to_save.default." in n}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_and_norms_learn_and_nothing_else_does(kind, base, trained):
    before, after = dict(adapted(kind, base).named_parameters()), dict(trained[kind][0].named_parameters())
    learnt = {name for name, p in after.items() if not torch.equal(p, before[name])}
    assert learnt == {name for name, p in after.items() if p.requires_grad}
    assert trained_norms(trained[kind][0]).keys() <= learnt
    assert len(trained_norms(trained[kind][0])) == 2 * 3 * 2  # layers, norms, gain and bias


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_loads_onto_its_base(kind, base, trained):
    model, folder = trained[kind]
    again = peft.PeftModel.from_pretrained(loaded(kind, base), folder / "adapter")
    assert torch.equal(logits(again), logits(model))
    for name, value in trained_norms(model).items():
        assert torch.equal(again.get_parameter(name), value), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_model_is_patched_and_saves_and_loads(kind, base, trained, tmp_path):
    """Adapters trained over 4-bit weights are merged into the full-precision base."""
    adapter = peft.PeftModel.from_pretrained(loaded("LoRA", base), trained[kind][1] / "adapter")
    expected, norms = logits(adapter), trained_norms(adapter)
    merged = adapter.merge_and_unload()
    assert isinstance(merged, QKNormModel)
    assert_near(logits(merged), expected, 1e-5)
    merged.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(merged)
    assert torch.equal(logits(again), logits(merged))
    for name, value in norms.items():
        path = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
        assert torch.equal(again.get_parameter(path), value), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_an_uninterrupted_one(kind, base, trained, tmp_path):
    whole, _ = trained[kind]
    trainer(adapted(kind, base), tmp_path, SaveAt(4)).train()
    second = trainer(adapted(kind, base), tmp_path)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 8
    resumed = peft.get_peft_model_state_dict(second.model)
    for name, value in peft.get_peft_model_state_dict(whole).items():
        assert torch.equal(resumed[name], value), name
