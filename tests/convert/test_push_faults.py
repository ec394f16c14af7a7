"""Pushes over a bad connection: resumed uploads, and no commit before every file has arrived."""

from __future__ import annotations

import hashlib
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_qknorm import push_to_hub
from qknorm_tests.push_cases import SHARDS, checkpoint, logits
from qknorm_tests.server import Fault, Hub

UPLOAD = "PUT /lfs/"
REQUESTS = [
    "GET .*/models/me/tiny",
    "POST .*/repos/create",
    "POST .*/preupload/",
    "POST .*/objects/batch",
    UPLOAD,
    "POST /verify/",
    "POST .*/commit/",
]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client would sleep between its attempts."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("made") / "out", max_shard_size="200KB")


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "out")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def assert_whole(hub: Hub, out: Path) -> None:
    (commit,) = hub.commits("me/tiny")
    assert set(SHARDS) <= set(commit.files)
    for name in SHARDS:
        assert commit.files[name] == (out / name).read_bytes()


AGAIN = "The same command may be run again: files that have arrived are not sent twice, and if the commit was made and"


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_push_goes_on_after_a_lost_answer(hub, out, waits, request_):
    """The Hub has served the request, which the client can't know: a second push has no second effect."""
    hub.faults.append(Fault(request_, lose_answer=True))
    with suppress(OSError):  # some requests the client repeats
        push_to_hub(out, "me/tiny")
    push_to_hub(out, "me/tiny")
    assert_whole(hub, out)


def test_a_shard_is_sent_again_after_a_broken_connection(hub, out, waits):
    hub.faults.append(Fault(UPLOAD, cut=50_000))
    push_to_hub(out, "me/tiny")
    assert waits == [1]
    assert_whole(hub, out)


@pytest.mark.parametrize("fault", [Fault(UPLOAD, cut=50_000), Fault(UPLOAD, status=403)], ids=["cut", "refused"])
def test_a_failed_push_is_resumed(hub, out, waits, fault):
    largest = max(out.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    hub.faults.append(Fault(f"{UPLOAD}.*{sha256(largest)}", times=6, status=fault.status, cut=fault.cut))
    with pytest.raises(OSError, match=f"me/tiny: .*{AGAIN}"):
        push_to_hub(out, "me/tiny")
    assert hub.commits("me/tiny") == []
    arrived = set(hub.repos["me/tiny"].large)  # depends on the client's order
    missing = {sha256(path) for path in out.glob("*.safetensors")} - arrived
    assert sha256(largest) in missing
    hub.received.clear()
    hub.faults.clear()
    push_to_hub(out, "me/tiny")
    assert sorted(oid for oid, _ in hub.received) == sorted(missing)
    assert_whole(hub, out)
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained("me/tiny")), logits(AutoModelForCausalLM.from_pretrained(out))
    )


def test_a_hub_that_can_not_be_reached(hub, out, waits):
    hub.stop()
    with pytest.raises(ConnectionError, match="^me/tiny: no connection to the Hub .*may be run again") as error:
        push_to_hub(out, "me/tiny")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_hub_that_stays_down_is_one_line(hub, out, waits, request_):
    hub.faults.append(Fault(request_, times=1000, status=503))
    with pytest.raises(OSError, match="^me/tiny: (the Hub answered 503|the upload failed|no connection)") as error:
        push_to_hub(out, "me/tiny")
    assert "\n" not in str(error.value)
    assert hub.commits("me/tiny") == []
