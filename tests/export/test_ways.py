"""`hf-qknorm export CKPT` lists the ways to serve a checkpoint: those that the export and the servers take."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_native import EPS, RMS, save_patched

import hf_qknorm as qk
from hf_qknorm import Scheme, export_native
from hf_qknorm.demo.training import byte_tokenizer
from hf_qknorm.export.ways import Way, serving_ways
from hf_qknorm_command import main
from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.tables import sharp_model
from qknorm_tests.tiny import tiny_model

CASES: dict[str, tuple[str, dict[str, Any], Scheme]] = {
    "llama": ("llama", EPS, RMS),
    "llama, a knee": ("llama", EPS, RMS),
    "llama, sharp": ("llama", EPS, RMS),
    "llama, norms and a cap": ("llama", EPS, replace(RMS, softcap=50.0)),
    "llama, a cap": ("llama", EPS, Scheme(softcap=50.0)),
}


KNEES: dict[str, dict[str, float]] = {
    "llama, a knee": {"knee": 16.0},
    "llama, sharp": {"knee": 3.0, "sharpness": 8.0},
    "llama, norms and a cap": {"knee": 3.0, "sharpness": 8.0},
}


def ways_of(folder: Path) -> dict[str, Way]:
    return {way.name: way for way in serving_ways(folder)}


@pytest.mark.parametrize("case", CASES)
def test_the_ways_are_those_that_the_export_takes(tmp_path, case):
    model_type, settings, scheme = CASES[case]
    save_patched(tmp_path / "ours", model_type, settings, scheme, **KNEES.get(case, {}))
    found = [way for way in serving_ways(tmp_path / "ours") if way.name.startswith("any engine")]
    assert len(found) == (2 if scheme.norms else 1)
    for end, way in enumerate(found):
        places = (tmp_path / "ours", tmp_path / f"theirs{end}")
        if way.command is None:
            with pytest.raises(ValueError, match=re.escape(way.cost.removeprefix("refused: "))):
                export_native(*places, end_norms=bool(end))
        else:
            report = export_native(*places, end_norms=bool(end))
            assert way.name.startswith(f"any engine, as {report.architecture}")
            assert ("--texts" in way.command) == bool(end) == way.cost.startswith("inexact")


def test_what_an_engine_drops_is_refused(tmp_path):
    lost = {}
    for name in ("llama", "llama, a cap"):
        save_patched(tmp_path / name, *CASES[name], **KNEES.get(name, {}))
        qk.add_standalone(tmp_path / name)
        ways = ways_of(tmp_path / name)
        lost[name] = {x for x in ("transformers, batched", "vLLM") if ways[x].command is None}
    assert lost["llama"] == set()
    assert lost["llama, a cap"] == {"transformers, batched"}


def test_code_of_the_checkpoint_is_named_where_there_is_some(tmp_path):
    save_patched(tmp_path, *CASES["llama"])
    bare = ways_of(tmp_path)
    qk.add_standalone(tmp_path)
    ways = ways_of(tmp_path)
    for name, flag in (("transformers", "trust_remote_code=True"), ("vLLM", "--trust-remote-code")):
        assert flag in ways[name].command
        assert flag not in bare[name].command


def test_the_command_lists_them(tmp_path, capsys):
    save_patched(tmp_path / "ours", *CASES["llama, sharp"], **KNEES["llama, sharp"])
    assert main(["export", str(tmp_path / "ours")]) == 0
    printed = capsys.readouterr().out
    assert f"hf-qknorm export {tmp_path / 'ours'} DST --texts TEXT" in printed
    assert "the sharpness of 8 would be lost" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
    sharp_model("llama").save_pretrained(tmp_path / "plain")
    assert main(["export", str(tmp_path / "plain")]) == 1
    assert "is a plain llama, not a patched model" in capsys.readouterr().err


def test_a_path_in_a_command_is_quoted(tmp_path):
    folder = tmp_path / "our model's"
    save_patched(folder, *CASES["llama, a knee"], **KNEES["llama, a knee"])
    qk.add_standalone(folder)
    commands = [way.command for way in serving_ways(folder) if way.command and "our" in way.command]
    assert len(commands) == 3
    assert all(str(folder) in shlex.split(command) for command in commands)


def test_texts_measure_the_removal(tmp_path, capsys):
    tokenizer = byte_tokenizer()
    model = qk.patch_model(tiny_model("llama", vocab_size=len(tokenizer), initializer_range=0.2), "qk_norm")
    ids = tokenizer("to be or not to be " * 60, return_tensors="pt")["input_ids"]
    qk.calibrate(model, [ids.view(-1, 20)], knee=1.0)
    save_with_tokenizer(model, tmp_path / "ours")
    (tmp_path / "text.txt").write_text("that is the question " * 60)
    command = ["export", str(tmp_path / "ours"), "--texts", str(tmp_path / "text.txt"), "--tokens", "512"]
    assert main(command) == 0
    listed = re.search(r"inexact: (\S+) nats per token on 512 tokens", capsys.readouterr().out)
    assert main([*command[:2], str(tmp_path / "theirs"), *command[2:]]) == 0
    assert listed
    assert f"({listed[1]} nats per token) on 512 tokens" in capsys.readouterr().out


def test_flags_that_the_list_does_not_use_are_refused(tmp_path, capsys):
    save_patched(tmp_path / "ours", *CASES["llama, a cap"])
    (tmp_path / "text.txt").write_text("to be or not to be")
    for flags in (["--overwrite"], ["--texts", str(tmp_path / "text.txt")]):
        assert main(["export", str(tmp_path / "ours"), *flags]) == 1
    found = capsys.readouterr().err
    assert "are for an export" in found
    assert "no way to serve it has a cost to measure" in found
