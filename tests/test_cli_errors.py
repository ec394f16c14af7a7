"""Errors of the command line: one line that names the cause, before anything is computed or written."""

import re
import shutil
from pathlib import Path

import pytest
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM

from hf_qknorm import cli, patch_model
from hf_qknorm.small_model import byte_tokenizer
from qknorm_tests.tiny import tiny_model

TEXT = "the quick brown fox jumps over the lazy dog. " * 20


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    """A folder with valid and broken checkpoints, texts and destinations."""
    root = tmp_path_factory.mktemp("places")
    (root / "FILE").write_text("x")
    (root / "BINARY").write_bytes(bytes(range(256)) * 8)
    (root / "TEXT.txt").write_text(TEXT)
    (root / "FOLDER").mkdir()
    (root / "BLOCKED" / "inspect.json").mkdir(parents=True)
    (root / "BLOCKED" / "demo.png").mkdir()
    (root / "PHOTOS" / "model").mkdir(parents=True)
    (root / "PHOTOS" / "model" / "one.png").write_text("")
    for name in ("MODEL", "NO-TOKENIZER", "SMALL"):
        tiny_model("llama", vocab_size=100 if name == "SMALL" else 300).save_pretrained(root / name)
        if name != "NO-TOKENIZER":
            byte_tokenizer().save_pretrained(root / name)
    shutil.copytree(root / "MODEL", root / "BROKEN")
    (root / "BROKEN" / "model.safetensors").write_bytes(b"\xff" * 100)
    small = BertConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=30)
    BertForMaskedLM(small).save_pretrained(root / "BERT")
    patch_model(tiny_model("llama", vocab_size=300), "qk_norm").save_pretrained(root / "PATCHED")
    shutil.copytree(root / "PATCHED", root / "NULL")
    (root / "NULL" / "config.json").write_text("null")
    return root


NOWHERE = "no such file or folder: ./nowhere.txt"
COMMON = [  # what every command that takes a checkpoint refuses as one
    ("./nowhere", "./nowhere is no folder"),
    ("FOLDER", "FOLDER"),
    ("BINARY", "BINARY is no folder"),
    ("BROKEN", "model.safetensors is truncated or corrupted"),
    ("", "is empty, which would mean the working directory"),
]
CALIBRATING = ("max-loss-increase", "knee", "length")
ERRORS = [
    (["demo", "--data", "./nowhere.txt"], NOWHERE),
    (["export", "x" * 9000, "out"], "src is 'xxx"),
    (["demo", "--data", ""], "the text's source is empty, which would mean the working directory"),
    (["demo", "--data", "BINARY"], "BINARY is no text in UTF-8"),
    (["demo", "--data", "FOLDER"], "FOLDER: no text in it (in a folder, .txt"),
    (["demo", "--data", "FILE"], "expected over 257 tokens for sequences of 256, got"),
    (["demo", "--out", "FILE"], "FILE is a file: give a folder"),
    (["demo", "--out", "x" * 300], "File name too long"),
    (["demo", "--out", "BLOCKED"], "BLOCKED/demo.png is a folder"),
    (["demo", "--out", "PHOTOS"], "PHOTOS/model holds no config.json"),
    (["demo", "--data", "TEXT.txt", "--checkpoint", "BROKEN"], "model.safetensors is truncated or corrupted"),
    (["demo", "--checkpoint", "BERT"], "bert has bidirectional attention"),
    (["demo", "--data", "TEXT.txt", "--checkpoint", "NO-TOKENIZER"], "NO-TOKENIZER: no tokenizer can be loaded"),
    (["demo", "--checkpoint", "PATCHED"], "PATCHED is converted already: give the original checkpoint"),
    *((["convert", name, "out"], message) for name, message in COMMON),
    (["convert", "MODEL", "FILE"], "FILE is a file or a link"),
    (["convert", "MODEL", "out", "--data", "./nowhere.txt"], NOWHERE),
    *((["convert", "./nowhere", "out", f"--{x}", "64"], " is for a calibration, on text: pass") for x in CALIBRATING),
    (["convert", "./nowhere", "out", "--exportable"], "exportable is for a calibration, on text: pass data="),
    *((["convert", "MODEL", "out", f"--max-memory={x}"], "no size of memory") for x in ("0", "-8GB", "8XB", "9" * 400)),
    (["convert", "MODEL", "out", "--data", "FILE"], "gives 0 tokens to predict, expected at least 16"),
    (["convert", "NO-TOKENIZER", "out", "--data", "TEXT.txt", "--dry-run"], "no tokenizer can be loaded"),
    (["convert", "SMALL", "out", "--data", "TEXT.txt"], "the model has 100, from 0 on: is this its tokenizer?"),
    *((["inspect", name], message) for name, message in COMMON),
    (["inspect", "./nowhere", "--data", "./nowhere.txt"], NOWHERE),
    (["inspect", "MODEL", "--max-tokens", "1"], "gives 0 tokens to predict, expected at least 16: give more text, or"),
    (["inspect", "./nowhere", "--out", "FILE"], "FILE is a file: give a folder"),
    (["inspect", "./nowhere", "--out", "BLOCKED"], "BLOCKED/inspect.json is a folder"),
    (["monitor", "./nowhere.jsonl"], "no such file: ./nowhere.jsonl"),
    (["monitor", "FOLDER"], "FOLDER: Is a directory"),
    (["monitor", "TEXT.txt"], "TEXT.txt: the log holds no sample yet"),
    (["monitor", "./nowhere.jsonl", "--out", "FOLDER"], "FOLDER is a folder, and a file is to be written there"),
    (["monitor", "./nowhere.jsonl", "--out", "FILE/x.png"], "FILE is a file: give a folder"),
    (["export", "BROKEN", "out"], "model.safetensors is truncated or corrupted"),
    (["export", "NULL", "out"], "NULL/config.json can't be read (TypeError"),
    (["export", "PATCHED", "FILE"], "FILE is a file or a link"),
    (["card", "FILE"], "FILE/config.json is missing"),
    (["push", "PATCHED", "me/tiny"], "offline mode is enabled"),
    (["push", "FILE", "me/tiny"], "FILE is no folder: expected one with a checkpoint"),
    (["push", "MODEL", "me/tiny"], "or patch the model and save it. `hf upload` pushes plain models, as exports are"),
]
USAGE = [
    ([], "Missing command. (see hf-qknorm --help)"),
    (["patch"], "No such command 'patch'"),
    (["inspect"], "Missing argument 'CKPT'"),
    (["inspect", "x", "--texts", "y"], "No such option: --texts"),
    *((["demo", "--steps", text], "Invalid value for '--steps'") for text in ("0", "-1", "abc", "1.5", "")),
    (["demo", "--base-steps", "9" * 5000], "Invalid value for '--base-steps'"),
    *((["demo", "--rate", text], "Invalid value for '--rate'") for text in ("nan", "inf", "0", "-1", "fast")),
    *((["inspect", "x", "--cap", text], "Invalid value for '--cap'") for text in ("nan", "inf", "0", "-1", "1e300")),
    *((["convert", "x", "y", "--knee", text], "Invalid value for '--knee'") for text in ("nan", "-1")),
    (["convert", "x", "y", "--scheme", "QK_NORM"], "unknown scheme 'QK_NORM', did you mean 'qk_norm'? Presets: none"),
    (["convert", "x", "y", "--scheme", '{"q": rms}'], "Expecting value: line 1 column 7"),
    (["convert", "x", "y", "--scheme", '{"softcap": NaN}'], "Scheme(softcap=nan) is not possible"),
    (["convert", "x", "y", "--scheme", '{"q":' * 100_000], "or JSON as"),
]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status, and the single line on stderr."""
    status = cli.main(arguments)
    error = capsys.readouterr().err
    assert error.startswith("hf-qknorm: ")
    assert error.endswith("\n")
    assert error.count("\n") == 1
    return status, error


def named(arguments: list[str]) -> str:
    return " ".join(argument[:20] for argument in arguments)


@pytest.mark.parametrize(("arguments", "message"), ERRORS, ids=[named(arguments) for arguments, _ in ERRORS])
def test_errors_that_a_user_can_fix_are_one_line(places, capsys, monkeypatch, arguments, message):
    def computed(*_: object, **__: object) -> None:
        raise AssertionError("the error comes too late")

    monkeypatch.chdir(places)
    monkeypatch.setattr("hf_qknorm.demo.train", computed)
    if message.startswith(("BINARY", "gives 0", "the model has", "no such", "FILE is a file")):
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", computed)
    before = listing(places)
    status, error = refused(arguments, capsys)
    assert status == 1
    assert message in error
    assert listing(places) == before


@pytest.mark.parametrize(("arguments", "message"), USAGE, ids=[named(arguments) for arguments, _ in USAGE])
def test_wrong_arguments_are_reported_in_one_line(capsys, arguments, message):
    status, error = refused(arguments, capsys)
    assert status == 2
    assert message in error
    assert re.search(r"\(see hf-qknorm( \w+)? --help\)$", error.rstrip())


def test_a_full_disk_is_reported_in_one_line(capsys, monkeypatch):
    def fail() -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(cli, "field_values", fail)
    assert refused(["schemes"], capsys) == (1, "hf-qknorm: I/O error: No space left on device (os error 28)\n")


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(cli, "field_values", lambda: {}["no such key"])
    with pytest.raises(KeyError):
        cli.main(["schemes"])
