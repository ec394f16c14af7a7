"""The recipes on transformers' Trainer, from end to end, each at its smallest size."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lora
import muon_clip
import pretrain
import pytest
import scratch
import text_trainer as common
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hf_qknorm as qk
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.reports.logit_log import LogitSample, read_log
from hf_qknorm.small_model import byte_tokenizer
from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.tiny import tiny_model

SMALL = ["--length", "32", "--max_steps", "4", "--every", "2", "--use_cpu", "true", "--disable_tqdm", "true"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """A tiny byte-level Llama with its tokenizer."""
    return str(save_with_tokenizer(tiny_model("llama", vocab_size=257), tmp_path_factory.mktemp("checkpoint")))


def test_pretraining_starts_near_the_unpatched_loss_and_ends_in_a_checkpoint(text, checkpoint, tmp_path):
    command = ["--checkpoint", checkpoint, "--text", text, "--calibration", "2", "--learning_rate", "1e-2"]
    calibrated, end = pretrain.main([*command, *SMALL, "--output_dir", str(tmp_path)]).values()
    assert calibrated == pytest.approx(tiny_loss(checkpoint, text), abs=0.01)
    assert end < calibrated
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.qk_norm["softcap"] == 50
    assert [json.loads(line)["step"] for line in (tmp_path / "logits.jsonl").read_text().splitlines()] == [2, 4]


def test_a_run_replaces_or_resumes_an_earlier_one(text, checkpoint, tmp_path):
    command = ["--config", checkpoint, "--text", text, *SMALL, "--output_dir", str(tmp_path)]
    command += ["--save_strategy", "steps", "--save_steps", "2"]

    def run(*more: str) -> tuple[float, list[LogitSample]]:
        return scratch.main([*command, *more])["after 4 steps"], read_log(tmp_path / "logits.jsonl")

    whole = run()
    assert run() == whole
    assert run("--resume_from_checkpoint", str(tmp_path / "checkpoint-2")) == whole


def test_a_converted_checkpoint_is_trained_as_it_is(text, checkpoint, tmp_path, capsys):
    converted = str(save_with_tokenizer(qk.patch_model(tiny_model("llama", vocab_size=257), "qk_norm"), tmp_path))
    command = ["--checkpoint", converted, "--text", text, "--share", "0", *SMALL]
    pretrain.main([*command, "--output_dir", str(tmp_path / "out")])
    shown = capsys.readouterr().out
    assert f"{converted} is converted already: q=rms, k=rms" in shown
    assert "calibrating" not in shown


@pytest.mark.slow
def test_two_processes_train_as_one(text, tmp_path):
    """Also where the loss before training is measured: `Trainer.evaluate` would then leave out DDP."""
    converted = save_with_tokenizer(qk.patch_model(tiny_model("llama", vocab_size=257), "qk_norm"), tmp_path)
    command = ["--checkpoint", str(converted), "--text", text, "--share", "0", *SMALL]
    command += ["--data_seed", "7", "--learning_rate", "1e-2"]
    one = pretrain.main([*command, "--per_device_train_batch_size", "4", "--output_dir", str(tmp_path / "one")])
    two = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", pretrain.__file__]
    two += [*command, "--per_device_train_batch_size", "2", "--output_dir", str(tmp_path / "two")]
    environment = os.environ | {"PYTHONPATH": str(Path(qk.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(two, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert f"| after 4 steps | {one['after 4 steps']:.4f} |" in run.stdout
    weights = (load_file(tmp_path / folder / "model.safetensors") for folder in ("one", "two"))
    torch.testing.assert_close(*weights, atol=1e-5, rtol=1e-4)


def test_muon_clip_lowers_the_largest_logit_and_resumes(text, checkpoint, tmp_path):
    command = ["--checkpoint", checkpoint, "--text", text, "--learning_rate", "1e-2", *SMALL]
    command += ["--save_strategy", "steps", "--save_steps", "2"]

    def run(folder: str, *more: str) -> tuple[dict[str, float], float]:
        out = tmp_path / folder
        losses = muon_clip.main([*command, *more, "--output_dir", str(out)])
        sample = json.loads((out / "logits.jsonl").read_text().splitlines()[-1])
        return losses, max(max(layer["max_logit"]) for layer in sample["layers"].values())

    losses, clipped = run("clipped", "--threshold", "0.001")
    free, logit = run("free", "--threshold", "0")
    assert losses["after 4 steps"] < losses["start"]
    assert free["after 4 steps"] < free["start"]
    assert clipped < logit
    again, _ = run("free", "--threshold", "0", "--resume_from_checkpoint", str(tmp_path / "free" / "checkpoint-2"))
    assert again["after 4 steps"] == free["after 4 steps"]


def test_muon_has_the_hidden_matrices_alone():
    model = tiny_model("gpt2", vocab_size=257)
    optimizer = muon_clip.make_optimizer(model, common.Arguments(learning_rate=1e-3, weight_decay=0.2))
    (hidden,) = (group["params"] for group in optimizer.muon.param_groups)
    names = {name for name, p in model.named_parameters() if any(p is matrix for matrix in hidden)}
    assert names == {name for name, p in model.named_parameters() if ".h." in name and p.dim() == 2}
    shared = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert shared == [(1e-3, 0.2), (1e-3, 0.2), (1e-3, 0.0)]


def test_muon_refuses_trainers_that_divide_matrices(text, checkpoint, tmp_path, monkeypatch):
    make = common.make_trainer

    def sharded(*given: Any, **options: Any) -> Any:
        trainer = make(*given, **options)
        trainer.is_deepspeed_enabled = True
        return trainer

    monkeypatch.setattr(common, "make_trainer", sharded)
    with pytest.raises(ValueError, match="divide matrices, which Muon needs whole"):
        muon_clip.main(["--checkpoint", checkpoint, "--text", text, *SMALL, "--output_dir", str(tmp_path)])


@pytest.mark.slow
def test_continued_training_has_every_arm_and_an_interrupted_run_continues(text, tmp_path, monkeypatch):
    recipe, sharp = importlib.import_module("continue"), tiny_model("llama", vocab_size=257, initializer_range=0.2)
    command = ["--checkpoint", str(save_with_tokenizer(sharp, tmp_path / "sharp")), "--knee", "4", "--text", text]
    command += ["--calibration", "2", "--rates", "1e-3", "1e-2", "--seeds", "2", *SMALL, "--output_dir", str(tmp_path)]
    page = recipe.main(command)
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 2 * 2 * len(recipe.ARMS)
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == [*recipe.ARMS]
    assert all(row.count(" ± ") == 2 and "nan" not in row for row in rows)
    monkeypatch.setattr(recipe, "run", None)
    assert recipe.main(command) == page  # from the log


def tiny_loss(checkpoint: str, text: str) -> float:
    """The unpatched model's loss on the recipes' held-out text."""
    tokens = byte_tokenizer()(Path(text).read_text())["input_ids"]
    ids = torch.tensor(tokens[int(len(tokens) * 0.9) :])
    ids = ids[: len(ids) // 32 * 32].view(-1, 32)[:48]
    with torch.no_grad():
        return float(AutoModelForCausalLM.from_pretrained(checkpoint)(input_ids=ids, labels=ids).loss)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft calls it by its old name
def test_lora_trains_the_gains_and_merges_exactly(text, checkpoint, tmp_path, capsys):
    command = ["--checkpoint", checkpoint, "--text", text, "--calibration", "2"]
    losses = lora.main([*command, *SMALL, "--learning_rate", "1e-2", "--output_dir", str(tmp_path)])
    start, end, merged = losses.values()
    assert end < start
    assert merged == pytest.approx(end, abs=1e-5)
    assert (tmp_path / "adapter_model.safetensors").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert all(layer.q_norm.weight.std() > 0 for layer in patched_layers(loaded).values())
    lines = capsys.readouterr().out.splitlines()
    stages = [
        "calibrating qk_norm",
        "calibrated",
        "held-out loss, converted",
        "training for 4 steps",
        "held-out loss, after",
    ]
    places = [next(i for i, line in enumerate(lines) if line.startswith(stage)) for stage in stages]
    assert places == sorted(places)  # each stage is printed when it begins or ends, not at the end


@pytest.mark.parametrize(("characters", "least"), [(300, 30), (20, 2)])
def test_a_text_without_a_row_to_judge_by_is_refused(characters, least, checkpoint, tmp_path):
    (tmp_path / "short.txt").write_text("a" * characters)
    command = ["--config", checkpoint, "--text", str(tmp_path / "short.txt"), *SMALL]
    with pytest.raises(ValueError, match=rf"a part of the text has {least} tokens, expected 32 or more \(--length\)"):
        scratch.main([*command, "--output_dir", str(tmp_path / "out")])


@pytest.mark.parametrize(
    "method", [["--scheme", "qk_norm"], ["--scheme", "none", "--quack", "1"], ["--scheme", "none", "--qk_clip", "100"]]
)
def test_training_from_scratch_learns(method, text, checkpoint, tmp_path):
    command = ["--config", checkpoint, "--text", text, *method]
    start, end = scratch.main([*command, *SMALL, "--learning_rate", "1e-2", "--output_dir", str(tmp_path)]).values()
    assert end < start
    expected = "llama" if "none" in method else "qknorm_llama"
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.model_type == expected
