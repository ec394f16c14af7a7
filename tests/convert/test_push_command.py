"""`hf-qknorm push` and `convert --push` against a local Hub, as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_qknorm import cli
from hf_qknorm.demo.training import byte_tokenizer
from hf_qknorm.files.names import REPORT
from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.push_cases import checkpoint, logits
from qknorm_tests.server import Fault, Hub
from qknorm_tests.tiny import tiny_model

PLOTS = ("qk_norm_loss.png", "qk_norm_logits.png")
# Run by a user who has transformers, and not this package.
READER = """
import sys
sys.modules["hf_qknorm"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("me/tiny", trust_remote_code=True).eval()
print(AutoTokenizer.from_pretrained("me/tiny", trust_remote_code=True)("abc")["input_ids"])
with torch.no_grad():
    torch.save(model(torch.arange(40).reshape(2, 20)).logits, sys.argv[1])
"""


def run(hub: Hub, home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a fresh environment: a new home folder and an empty cache."""
    kept = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT", "PYTHONPATH") if name in os.environ}
    own = {"HOME": str(home), "HF_HOME": str(home / "hf"), "HF_ENDPOINT": hub.url, "NO_PROXY": "127.0.0.1"}
    settings = {"HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_writes", "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    return subprocess.run(command, env=kept | own | settings, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_pushed_model_loads_without_the_package(hub, tmp_path):
    out = checkpoint(tmp_path / "out", max_shard_size="200KB")
    done = run(hub, tmp_path, sys.executable, "-m", "hf_qknorm.cli", "push", str(out), "tiny", "--private")
    assert done.returncode == 0, done.stderr
    (commit,) = hub.commits("me/tiny")
    assert done.stdout == f"pushed: {hub.url}/me/tiny/commit/{commit.oid}\n"
    assert hub.repos["me/tiny"].private
    assert "hf_writes" not in done.stderr
    read = run(hub, tmp_path, sys.executable, "-c", READER, str(tmp_path / "logits"))
    assert read.returncode == 0, read.stderr
    assert read.stdout == f"{byte_tokenizer()('abc')['input_ids']}\n"
    expected = logits(AutoModelForCausalLM.from_pretrained(out, attn_implementation="hf_qknorm_eager"))
    torch.testing.assert_close(torch.load(tmp_path / "logits"), expected)


@pytest.fixture
def source(tmp_path: Path) -> str:
    return str(save_with_tokenizer(tiny_model("llama", vocab_size=300), tmp_path / "source"))


def test_convert_pushes_its_output(hub, source, tmp_path, capsys):
    out, text = tmp_path / "out", tmp_path / "corpus.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    calibrate = ["--data", str(text), "--method", "moments"]
    assert cli.main(["convert", source, str(out), *calibrate, "--push", "me/tiny"]) == 0
    (commit,) = hub.commits("me/tiny")
    assert capsys.readouterr().out.endswith(f"\npushed: {hub.url}/me/tiny/commit/{commit.oid}\n")
    for name in ("model.safetensors", REPORT):
        assert commit.files[name] == (out / name).read_bytes()
    for name in PLOTS:
        assert commit.files[name].startswith(b"\x89PNG")
        assert name.encode() in commit.files["README.md"]
    again = tmp_path / "again"
    assert cli.main(["convert", source, str(again), "--scheme", "qk_norm", "--push", "me/tiny"]) == 0
    last = hub.commits("me/tiny")[-1]
    assert {REPORT, *PLOTS, "config.json", "model.safetensors"} <= set(last.changed)
    assert {REPORT, *PLOTS} & set(last.files) == set()


def test_convert_checks_the_token_before_it_starts(hub, source, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    assert cli.main(["convert", source, str(tmp_path / "out"), "--push", "me/tiny"]) == 1
    assert "no token for the Hub: run `hf auth login`" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_failed_upload_is_one_line(hub, tmp_path, capsys):
    out = checkpoint(tmp_path / "out")
    hub.faults.append(Fault("PUT /lfs/", status=403, times=9))
    assert cli.main(["push", str(out), "me/tiny", "--message", "First"]) == 1
    line = capsys.readouterr().err.partition("hf-qknorm: ")[2]
    assert line.startswith("me/tiny: the upload failed (HfHubHTTPError: 403 ")
    assert "The same command may be run again" in line
    assert line.count("\n") == 1
    hub.faults.clear()
    assert cli.main(["push", str(out), "me/tiny", "--message", "First", "--revision", "main"]) == 0
    assert [commit.title for commit in hub.commits("me/tiny")] == ["First"]
