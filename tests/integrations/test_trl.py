"""TRL's trainers on patched models: by a folder's name, and patched in memory, where a reference has to be given."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hf_qknorm import LogitMonitor, patch_model, peft_modules_to_save
from hf_qknorm.model.derived import QKNormModel
from qknorm_tests.covering import covering
from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.slow import slow_but
from qknorm_tests.tables import sharp_model

trl = pytest.importorskip("trl", reason="needs TRL")
datasets = pytest.importorskip("datasets", reason="needs datasets")
peft = pytest.importorskip("peft", reason="needs PEFT")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # TRL and PEFT use each other's and transformers' old names
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TEXTS = ["The cat sat on the mat.", "Why? Because it rained all day.", "One and one is two.", "Yes."]
PAIRS = [
    {"prompt": "What is it? ", "chosen": "A cat.", "rejected": "No"},
    {"prompt": "Why? ", "chosen": "So", "rejected": "Because"},
]
UNPAIRED = [
    {"prompt": "What is it? ", "completion": "A cat.", "label": True},
    {"prompt": "Why? ", "completion": "No", "label": False},
]
PROMPTS = [{"prompt": "What is it? "}, {"prompt": "Why? "}]
ONLINE = {"max_completion_length": 4, "num_generations": 2, "beta": 0.1}


def places(completions: list[str], **_: Any) -> list[float]:
    """Rewards that differ whatever is sampled: with equal ones there is no gradient."""
    return [float(place) for place in range(len(completions))]


# Trainer, rows, settings, arguments of the trainer, and values that a reference equal to the policy gives at the start.
METHODS: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any], dict[str, Any], dict[str, float]]] = {
    "SFT": ("SFT", [{"text": text} for text in TEXTS], {}, {}, {}),
    "Reward": ("Reward", PAIRS, {}, {}, {}),
    "DPO": ("DPO", PAIRS, {}, {}, {"loss": math.log(2), "rewards/margins": 0.0}),
    "KTO": ("KTO", UNPAIRED, {}, {}, {"loss": 0.5, "kl": 0.0}),
    "GRPO": ("GRPO", PROMPTS, ONLINE, {"reward_funcs": places}, {"kl": 0.0}),
    "RLOO": ("RLOO", PROMPTS, ONLINE, {"reward_funcs": places}, {"kl": 0.0}),
}
REFERRING = [name for name, (*_, start) in METHODS.items() if start]


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory) -> Path:
    """An unpatched checkpoint with its tokenizer."""
    return save_with_tokenizer(sharp_model("llama", vocab_size=257), tmp_path_factory.mktemp("unpatched"))


@pytest.fixture(scope="module")
def patched_folder(unpatched, tmp_path_factory) -> Path:
    """A patched checkpoint with its tokenizer."""
    return save_with_tokenizer(in_memory(unpatched), tmp_path_factory.mktemp("patched"))


def in_memory(unpatched: Path, scheme: str = "qk_norm_cap", auto: Any = AutoModelForCausalLM, **options: Any) -> Any:
    return patch_model(auto.from_pretrained(unpatched, **options), scheme)


def made(method: str, model: Any, folder: Path, arguments: Mapping[str, Any] = {}, **options: Any) -> Any:
    """The trainer of a method for one step, by default without a tokenizer or a reference."""
    name, rows, settings, own, _ = METHODS[method]
    common = {"max_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1}
    common |= {"bf16": False, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 0, "save_strategy": "no"}
    args = getattr(trl, f"{name}Config")(str(folder), **{**common, **settings, **options})
    rows = datasets.Dataset.from_list(rows)
    return getattr(trl, f"{name}Trainer")(model=model, args=args, train_dataset=rows, **own, **arguments)


def first_log(run: Any) -> dict[str, float]:
    return next(entry for entry in run.state.log_history if "loss" in entry)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


STEPS = covering(METHODS, ["folder", "memory"], strength=1)


@pytest.mark.parametrize(("method", "source"), slow_but([x for x in STEPS if x[0] in ("SFT", "DPO", "GRPO")], STEPS))
def test_one_step(method, source, unpatched, patched_folder, tmp_path):
    reward = {"auto": AutoModelForSequenceClassification, "num_labels": 1} if method == "Reward" else {}
    model = str(patched_folder) if source == "folder" else in_memory(unpatched, **reward)
    if source == "memory" and method in REFERRING:  # the name leads to the model before
        with pytest.raises(OSError, match="of a model that was changed in memory"):
            made(method, model, tmp_path / "run")
        model = save_with_tokenizer(model, tmp_path / "patched")
    run = made(method, str(model) if isinstance(model, Path) else model, tmp_path / "run")
    before = weights(run.model)
    reference = getattr(run, "ref_model", None)
    run.train()
    log = first_log(run)
    assert math.isfinite(log["loss"])
    for key, value in METHODS[method][-1].items():
        assert log[key] == pytest.approx(value, abs=1e-5)
    assert isinstance(run.model, QKNormModel)
    after = run.model.state_dict()
    assert not torch.equal(
        after["model.layers.0.self_attn.q_norm.weight"], before["model.layers.0.self_attn.q_norm.weight"]
    )
    if method in REFERRING:
        kept = run.accelerator.unwrap_model(reference)
        assert type(kept) is type(run.model)
        assert kept is not run.model
        assert all(torch.equal(value, before[name]) for name, value in kept.state_dict().items())
    run.save_model(str(tmp_path / "saved"))
    again = type(run.model).from_pretrained(tmp_path / "saved")
    assert all(torch.equal(value, after[name]) for name, value in again.state_dict().items())
    assert str(again.config.name_or_path) == str(tmp_path / "saved")


def test_a_sample_leaves_the_trainers_averages_to_its_own_log(unpatched, tmp_path):
    run = made("SFT", in_memory(unpatched), tmp_path / "run", max_steps=2, logging_steps=2)
    LogitMonitor(every=1).attach(run)
    run.train()
    sampled = [entry for entry in run.state.log_history if "attention/max_logit" in entry]
    assert [entry["step"] for entry in sampled] == [1, 2]
    assert not any("mean_token_accuracy" in entry for entry in sampled)
    assert "mean_token_accuracy" in first_log(run)


@pytest.mark.parametrize("source", ["folder", "memory"])
def test_packing_with_adapters_and_checkpointing(source, unpatched, patched_folder, tmp_path):
    """The first loss is that of the texts one by one: none sees another in its row."""
    model = AutoModelForCausalLM.from_pretrained(patched_folder) if source == "folder" else in_memory(unpatched)
    tokenizer = AutoTokenizer.from_pretrained(unpatched)
    rows = [tokenizer(text + tokenizer.eos_token, return_tensors="pt")["input_ids"] for text in TEXTS]
    with torch.no_grad():
        apart = [model.eval()(row, labels=row).loss * (row.shape[1] - 1) for row in rows]
    expected = float(sum(apart)) / sum(row.shape[1] - 1 for row in rows)
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=peft_modules_to_save(model))
    options = {"packing": True, "max_length": 96, "gradient_checkpointing": True}
    run = made("SFT", model, tmp_path, arguments={"peft_config": adapters}, **options)
    assert len(run.train_dataset) < len(TEXTS)
    run.train()
    assert first_log(run)["loss"] == pytest.approx(expected, rel=1e-4)
    run.save_model(str(tmp_path / "adapter"))
    base = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    if source == "folder":
        assert base == str(patched_folder)
        again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
        assert torch.equal(again(rows[0]).logits, run.model.eval()(rows[0]).logits)
        return
    assert base.startswith(f"{unpatched} (")
    with pytest.raises(OSError, match="changed in memory, .*, not saved: put the folder of the saved model here"):
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
