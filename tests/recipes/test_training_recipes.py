"""The recipes on transformers' Trainer, from end to end, each at its smallest size."""

from __future__ import annotations

import json
from pathlib import Path

import lora
import muon_clip
import pretrain
import pytest
import scratch
import torch
from transformers import AutoModelForCausalLM

from hf_qknorm.model.attention import patched_layers
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
    losses = pretrain.main([*command, *SMALL, "--output_dir", str(tmp_path)])
    calibrated, end = losses.values()
    assert calibrated == pytest.approx(tiny_loss(checkpoint, text), abs=0.01)
    assert end < calibrated
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.qk_norm["softcap"] == 50
    noted = (tmp_path / "logits.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in noted] == [2, 4]


def test_a_run_replaces_or_resumes_an_earlier_one(text, checkpoint, tmp_path):
    command = ["--config", checkpoint, "--text", text, *SMALL, "--output_dir", str(tmp_path)]
    command += ["--save_strategy", "steps", "--save_steps", "2"]

    def run(*more: str) -> tuple[float, bytes]:
        return scratch.main([*command, *more])["after 4 steps"], (tmp_path / "logits.jsonl").read_bytes()

    whole = run()
    assert run() == whole
    assert run("--resume_from_checkpoint", str(tmp_path / "checkpoint-2")) == whole


def test_muon_clip_trains_and_reports_its_clips(text, checkpoint, tmp_path, capsys):
    command = ["--checkpoint", checkpoint, "--text", text, "--learning_rate", "1e-2", "--threshold", "0.001"]
    losses = muon_clip.main([*command, *SMALL, "--output_dir", str(tmp_path)])
    assert losses["after 4 steps"] < losses["start"]
    lines = [line for line in capsys.readouterr().out.splitlines() if "clips of a head so far" in line]
    counts = [int(line.split()[-7]) for line in lines]
    assert len(counts) == 2
    assert 0 < counts[0] < counts[1]


def tiny_loss(checkpoint: str, text: str) -> float:
    """The unpatched model's loss on the recipes' held-out text."""
    tokens = byte_tokenizer()(Path(text).read_text())["input_ids"]
    ids = torch.tensor(tokens[int(len(tokens) * 0.9) :])
    ids = ids[: len(ids) // 32 * 32].view(-1, 32)[:48]
    with torch.no_grad():
        return float(AutoModelForCausalLM.from_pretrained(checkpoint)(input_ids=ids, labels=ids).loss)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft calls it by its old name
def test_lora_trains_the_gains_and_merges_exactly(text, checkpoint, tmp_path, capsys):
    command = ["--checkpoint", checkpoint, "--text", text, "--calibration", "2", "--method", "moments"]
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
        "moments",
        "held-out loss, qk_norm",
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
