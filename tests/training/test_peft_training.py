"""Adapters and norms trained by Trainer: LoRA, DoRA and QLoRA learn, resume, load and merge."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from hf_qknorm import Scheme, patch_model, peft_modules_to_save
from hf_qknorm.model.derived import QKNormModel
from qknorm_tests.kneed import logits
from qknorm_tests.short_runs import SaveAt, trainer
from qknorm_tests.tables import assert_near, sharp_model

SCHEME = Scheme(q="rms", k="layer", v="rms", bias=True, softcap=5.0)
WIDE = {"intermediate_size": 128}  # a multiple of the blocks of 4-bit weights
KINDS: dict[str, dict[str, Any]] = {"DoRA": {"use_dora": True}, "QLoRA": {}}

pytestmark = [
    pytest.mark.costly,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning"),  # peft uses the old name
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning"),
]


def loaded(kind: str, base: Path) -> PreTrainedModel:
    if kind != "QLoRA":
        return AutoModelForCausalLM.from_pretrained(base)
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=four, device_map="cpu")
    return peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})


def adapted(kind: str, base: Path) -> peft.PeftModel:
    model, targets = loaded(kind, base), ["q_proj", "k_proj", "v_proj", "o_proj"]
    torch.manual_seed(0)
    kept = {"modules_to_save": peft_modules_to_save(model), "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, **kept, **KINDS[kind]))


def trained_norms(model: peft.PeftModel) -> dict[str, Tensor]:
    return {n: p for n, p in model.named_parameters() if "_norm.modules_to_save.default." in n}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_learns_resumes_loads_and_merges(kind, tmp_path):
    """Adapters trained over 4-bit weights are merged into the full-precision base."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    base = tmp_path / "base"
    patch_model(sharp_model("llama", **WIDE), SCHEME).save_pretrained(base)
    run = trainer(adapted(kind, base), tmp_path / "whole")
    before = {name: p.clone() for name, p in run.model.named_parameters()}
    run.train()
    model, norms = run.model, trained_norms(run.model)
    learnt = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert learnt == {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(norms.keys() & learnt) == 2 * 3 * 2  # layers, norms, gain and bias

    trainer(adapted(kind, base), tmp_path / "parts", SaveAt(4)).train()
    resumed = trainer(adapted(kind, base), tmp_path / "parts")
    resumed.train(resume_from_checkpoint=True)
    states = [peft.get_peft_model_state_dict(each.model) for each in (run, resumed)]
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())

    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(loaded(kind, base), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))

    adapter = peft.PeftModel.from_pretrained(loaded("LoRA", base), tmp_path / "adapter")
    expected = logits(adapter)
    merged = adapter.merge_and_unload()
    assert isinstance(merged, QKNormModel)
    assert_near(logits(merged), expected, 1e-5)
    merged.save_pretrained(tmp_path / "merged")
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(alone), logits(merged))
    for name, value in norms.items():
        path = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
        assert torch.equal(alone.get_parameter(path), value), name
