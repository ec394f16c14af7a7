"""`hf-qknorm push` against a local Hub, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_qknorm import cli
from hf_qknorm.small_model import byte_tokenizer
from qknorm_tests.push_cases import checkpoint, logits
from qknorm_tests.server import Fault, Hub

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
