"""The refusals of `push_to_hub` and their messages; nothing is created or changed on the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from hf_qknorm import push_to_hub
from qknorm_tests.push_cases import checkpoint
from qknorm_tests.server import Hub
from qknorm_tests.tiny import tiny_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "out")


def other_type(hub: Hub, out: Path) -> None:
    hub.create("me/tiny", **{"config.json": b'{"model_type": "llama"}'})


def other_size(hub: Hub, out: Path) -> None:
    data = json.loads((out / "config.json").read_text()) | {"num_hidden_layers": 7}
    hub.create("me/tiny", **{"config.json": json.dumps(data).encode()})


def other_weights(hub: Hub, out: Path) -> None:
    hub.create("me/tiny", **{"pytorch_model.bin": b""})


def public(hub: Hub, out: Path) -> dict[str, Any]:
    hub.create("me/tiny", private=False)
    return {"private": True}


def no_branch(hub: Hub, out: Path) -> dict[str, Any]:
    hub.create("me/tiny")
    return {"revision": "next"}


def plain(hub: Hub, out: Path) -> None:
    tiny_model("llama", vocab_size=300).save_pretrained(out)


def truncated(hub: Hub, out: Path) -> None:
    (out / WEIGHTS).write_bytes((out / WEIGHTS).read_bytes()[:-10])


def no_gain(hub: Hub, out: Path) -> None:
    weights = load_file(out / WEIGHTS)
    del weights["model.layers.1.self_attn.q_norm.weight"]
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})


def linked_out(hub: Hub, out: Path) -> None:
    (out.parent / "elsewhere").write_text("{}")
    (out / "tokenizer.json").unlink()
    (out / "tokenizer.json").symlink_to(out.parent / "elsewhere")


REFUSALS: list[tuple[Any, type[Exception], str]] = [
    ({"token": "hf_unknown"}, PermissionError, "the Hub denied access (401"),
    ({"token": "hf_reads"}, PermissionError, "the Hub denied access (403"),
    ({"token": "hf_revoked"}, PermissionError, "the Hub denied access (403 You don't have the rights to write here)"),
    ({"repo_id": "you/tiny"}, PermissionError, "you/tiny: the Hub denied access (403"),
    ({"repo_id": "me/tiny/more"}, ValueError, "me/tiny/more"),
    (no_branch, OSError, "me/tiny: the Hub answered 404"),
    (other_type, ValueError, "holds another model (model_type 'llama', expected qknorm_llama)"),
    (other_size, ValueError, "holds another model (num_hidden_layers 7, expected 2)"),
    (other_weights, ValueError, "holds another model (pytorch_model.bin)"),
    (public, ValueError, "me/tiny is public: make it private in its settings"),
    ({"checkpoint": "./nowhere"}, FileNotFoundError, "nowhere is no folder"),
    ({"checkpoint": torch.nn.Linear(2, 2)}, ValueError, "a Linear can't be pushed"),
    (
        {"checkpoint": tiny_model("llama")},
        ValueError,
        "a LlamaForCausalLM can't be pushed: pass a model patched by patch_model",
    ),
    (plain, ValueError, "holds a plain llama: convert it first"),
    (truncated, ValueError, "model.safetensors is truncated"),
    (no_gain, ValueError, "model.layers.1.self_attn.q_norm.weight"),
    (linked_out, ValueError, "tokenizer.json is a link to"),
]


@pytest.mark.parametrize(("case", "kind", "message"), REFUSALS, ids=[message[:40] for *_, message in REFUSALS])
def test_a_refused_push_changes_nothing(hub, out, case, kind, message):
    options = {"checkpoint": out, "repo_id": "me/tiny"} | ((case(hub, out) or {}) if callable(case) else case)
    before = {name: repo.branches.copy() for name, repo in hub.repos.items()}
    with pytest.raises(kind) as error:
        push_to_hub(**options)
    assert message in str(error.value)
    assert "hf_writes" not in str(error.value)
    assert {name: repo.branches for name, repo in hub.repos.items()} == before
    assert {request for request in hub.requests if not request.startswith(("GET", "HEAD"))} <= {
        "POST /api/repos/create"
    }


def test_without_a_token(hub, out, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(
        PermissionError, match="no token for the Hub: run `hf auth login`, set HF_TOKEN, or pass token="
    ):
        push_to_hub(out, "me/tiny")
    assert not [request for request in hub.requests if "whoami" in request]


def test_offline(hub, out, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE is set, which forbids a push: unset it"):
        push_to_hub(out, "me/tiny")
    assert hub.requests == []


@pytest.mark.parametrize("strange", ["hf_writes\u200b", "\ufeffhf_writes", "hf_wri tes", "hf_wri\ttes", "hf_writés"])
def test_a_token_with_an_invalid_character_is_not_shown(hub, out, monkeypatch, strange):
    for options, held in (({"token": strange}, "hf_writes"), ({}, strange)):
        monkeypatch.setenv("HF_TOKEN", held)
        with pytest.raises(ValueError, match="the token for the Hub .* holds a character that no token has") as error:
            push_to_hub(out, "me/tiny", **options)
        assert "wri" not in str(error.value)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["a/b/c", "", "me/", "me/a b", "../x", None, 3, "me/" + "x" * 300])
def test_an_invalid_name_is_refused_before_any_request(hub, out, name):
    with pytest.raises(ValueError, match="the repository is .*, expected a name on the Hub, as OWNER/NAME"):
        push_to_hub(out, name, dry_run=True)
    assert hub.requests == []
