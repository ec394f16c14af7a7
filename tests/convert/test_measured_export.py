"""`hf-qknorm export --data`: norms that still act are taken off at a measured cost, or nothing is written."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm import Scheme, calibrate, cli, export_native, patch_model, remove_norms, set_knee
from hf_qknorm.convert.remeasure import export_measured
from hf_qknorm.measure.predictions import loss_of

TEXT = "Long ago, a small model of language was asked to forget its norms. " * 40
SHARP = Scheme(q="rms", k="rms")


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    (tmp_path / "corpus.txt").write_text(TEXT)
    return str(tmp_path / "corpus.txt")


def converted(llama: Path, scheme: Scheme, knee: float, dtype: torch.dtype = torch.float32) -> Path:
    """A patched and calibrated checkpoint with a tokenizer."""
    folder, tokenizer = llama.parent / "converted", AutoTokenizer.from_pretrained(llama)
    model = patch_model(AutoModelForCausalLM.from_pretrained(llama), scheme)
    calibrate(model, [TEXT], tokenizer=tokenizer, length=64, knee=knee, sharpness=8)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_export_is_the_model_without_norms_and_the_printed_losses_are_its_own(dtype, llama, corpus, capsys):
    folder = converted(llama, SHARP, 2.0, dtype)
    out = folder.parent / "plain"
    options = ["--max-loss-increase", "0.05", "--length", "64"]
    assert cli.main(["export", str(folder), str(out), "--data", corpus, *options]) == 0
    printed = capsys.readouterr().out
    assert "plain: LlamaForCausalLM, which transformers loads without hf_qknorm" in printed
    before, after, rise = map(float, re.findall(r"[+-]?\d+\.\d+", printed.splitlines()[-1]))
    assert rise == pytest.approx(after - before, abs=1.5e-4)

    ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")["input_ids"]
    batches = [{"input_ids": ids[0, : ids.numel() // 64 * 64].view(-1, 64)}]
    patched = AutoModelForCausalLM.from_pretrained(folder)
    assert loss_of(patched, batches) == pytest.approx(before, abs=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(out)
    assert plain.dtype == dtype
    assert loss_of(plain, batches) == pytest.approx(after, abs=1e-4)
    expected = remove_norms(patched, batches).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in plain.state_dict().items())


def test_a_rise_above_the_limit_writes_nothing(llama, corpus, capsys):
    folder = converted(llama, Scheme(q="rms", k="rms"), 0.01)
    before = sorted(folder.parent.iterdir())
    limit = ["--max-loss-increase", "0"]
    assert cli.main(["export", str(folder), str(folder.parent / "plain"), "--data", corpus, *limit]) == 1
    error = capsys.readouterr().err
    assert re.search(r"converted is not exported: without its norms the loss goes from \S+ to \S+ \(\+", error)
    assert "more than --max-loss-increase 0. Open the knee" in error
    assert sorted(folder.parent.iterdir()) == before


def test_a_cap_stays(llama, corpus):
    folder = converted(llama, Scheme(q="rms", k="rms", softcap=30.0), 2.0)
    found = export_measured(folder, folder.parent / "plain", corpus)
    assert found.export.architecture == "VaultGemmaForCausalLM"
    assert found.after == pytest.approx(found.before, abs=0.05)


@pytest.mark.parametrize("scheme", [Scheme(softcap=30.0), SHARP], ids=["no norms", "removed"])
def test_what_is_exported_without_a_text_is_measured_too(scheme, llama, corpus):
    folder, tokenizer = llama.parent / "converted", AutoTokenizer.from_pretrained(llama)
    model = patch_model(AutoModelForCausalLM.from_pretrained(llama), scheme)
    if scheme.norms:
        calibrate(model, [TEXT], tokenizer=tokenizer, length=64, knee=2.0, sharpness=8)
        set_knee(model, math.inf)
    for saved in (model, tokenizer):
        saved.save_pretrained(folder)
    found = export_measured(folder, folder.parent / "measured", corpus)
    export_native(folder, folder.parent / "plain")
    assert found.after == pytest.approx(found.before, abs=1e-5)
    files = [load_file(folder.parent / name / "model.safetensors") for name in ("measured", "plain")]
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())


def test_plain_norms_and_options_without_a_text_are_refused(llama, corpus, capsys):
    folder, out = converted(llama, SHARP, 0.0), llama.parent / "plain"
    with pytest.raises(ValueError, match="hold no mean length"):
        export_measured(folder, out, corpus)
    folder.parent.joinpath("taken").mkdir()
    folder.parent.joinpath("taken", "notes.txt").touch()
    with pytest.raises(FileExistsError, match="taken"):
        export_measured(folder, folder.parent / "taken", corpus)
    assert cli.main(["export", str(folder), str(out), "--length", "64"]) == 1
    assert "--length is for a measurement: give --data TEXT as well" in capsys.readouterr().err
    assert not out.exists()
