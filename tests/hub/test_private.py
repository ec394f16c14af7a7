"""Tokens and paths that a push refuses, and similar text that it accepts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_qknorm.hub.private import check_private, remove_local_origins

OWN = "hf_my_own"  # too short for the form of a token: refused because it is the user's
SECRETS = {
    "own": OWN,
    "user": "hf_" + "a1" * 17,
    "oauth": "hf_oauth_" + "eyJhbGciOiJFZERTQSJ9.eyJzY29wZSI6WyJyZWFkIl19.c2lnbmF0dXJl",
    "jwt": "hf_jwt_" + "eyJhbGciOiJFZERTQSJ9.eyJz",
    "organisation": "api_org_" + "Ab" * 17,
    "GitHub": "ghp_" + "a1" * 18,
    "GitHub, fine-grained": "github_pat_" + "a1" * 41,
    "GitLab": "glpat-" + "a1" * 10,
    "AWS": "AKIA" + "Q7" * 8,
    "Google": "AIza" + "a1-_b" * 7,
    "Azure": "AccountKey=" + "a1" * 43 + "==",
    "OpenAI": "sk-proj-" + "a1" * 20,
    "Anthropic": "sk-ant-" + "api03-" + "a1" * 20,
    "Slack": "xoxb-" + "12345678901-abcdefghijkl",
    "npm": "npm_" + "a1" * 18,
    "PyPI": "pypi-AgE" + "a1" * 30,
    "a key": "-----BEGIN " + "OPENSSH PRIVATE KEY-----",
}
NO_SECRETS = ["hf_transfer", "hf_token", "hf_oauth_token", "sk-learn", "AKIA", "ghp_", "-----BEGIN CERTIFICATE-----"]
NO_SECRETS += ["tensor.hf_" + "a" * 33, "task-ant-" + "a-" * 20, "api_organisation"]

PATHS = [
    "/mnt/models/llama", "/data/runs/7/", "/workspace/x", "/content/drive/My Drive/model", "file:///srv/models/x",
    "~/models", "C:\\Users\\me\\model", "D:/models/x", "\\\\server\\share\\x", "/data//x", "/mnt/ünïcode/x",
]  # fmt: skip
NO_PATHS = [
    "me/llama", "https://example.org/data/x", "s3://bucket/mnt/x", "//cdn.example.org/x", "/", "/think", "/no_think",
    "models/llama", "a /mnt/x b", "text/plain", "and/or", "{{ '/data/' }}", "c:", "~", "2026/01/02", "\\d+/\\w+",
]  # fmt: skip


def source(folder: Path, metadata: dict[str, str], tensors: list[str]) -> Any:
    """The parts of a `Source` that `check_private` reads, with one weights file."""
    stored = {name: SimpleNamespace(file="model.safetensors") for name in tensors}
    weights = SimpleNamespace(metadata={"model.safetensors": metadata}, stored=stored, files=["model.safetensors"])
    return SimpleNamespace(folder=folder / "checkpoint", weights=weights)


@pytest.fixture
def check(tmp_path):
    """Check files (name: text or JSON), metadata and names of tensors; returns the refusal, or None."""

    def refusal(files: dict[str, Any], metadata: dict[str, str] | None = None, tensors: list[str] | None = None) -> Any:
        paths = {}
        for name, content in files.items():
            paths[name] = tmp_path / name
            paths[name].write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
        try:
            check_private(paths, source(tmp_path, metadata or {}, tensors or []), OWN)
        except ValueError as error:
            return str(error)
        return None

    return refusal


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
def test_tokens_are_refused_wherever_they_are_and_never_printed(check, secret):
    refusals = {
        "LICENSE, line 2, contains ": check({"LICENSE": f"MIT\nlogin({secret})"}),
        "config.json, line 2, contains ": check({"config.json": {"a": secret}}),
        "chat_template.jinja, line 1, contains ": check({"chat_template.jinja": "{# " + secret + " #}"}),
        "model.safetensors (metadata), line 1, contains ": check({}, {"token": secret}),
        "model.safetensors (metadata), line 2, contains ": check({}, {"a": "b", secret: ""}),
        "model.safetensors (names of tensors), line 2, contains ": check({}, {}, ["a", f"model.{secret}"]),
    }
    for start, refusal in refusals.items():
        assert refusal.startswith(start)
        assert refusal.endswith(": remove it; nothing was uploaded")
        assert secret not in refusal


def test_a_token_in_a_files_name_is_refused(check):
    refusal = check({"LICENSE": "", f"LICENSE-{SECRETS['user']}": ""})
    assert refusal == "the files' names, line 2, contains a token of the Hub: remove it; nothing was uploaded"


@pytest.mark.parametrize("word", NO_SECRETS)
def test_text_similar_to_a_token_is_accepted(check, word):
    assert check({"LICENSE": word, "config.json": {"a": word}}, {word: word}, [word]) is None


@pytest.mark.parametrize("path", PATHS)
def test_a_path_as_a_setting_is_refused_with_its_key(check, path):
    shown = f"contains a path of this machine ({path!r}): remove it; nothing was uploaded"
    for name, data, key in [
        ("tokenizer_config.json", {"a": 1, "special_tokens_map_file": path}, "special_tokens_map_file"),
        ("tokenizer_config.json", {"tokenizer_file": path}, "tokenizer_file"),
        ("config.json", {"text_config": {"made_in": path}}, "text_config.made_in"),
        ("config.json", {"made_in": ["x", {"y": path}]}, "made_in[1].y"),
        ("config.json", {"a": {path: 1}}, "a, key 1"),
        ("special_tokens_map.json", {"from": path}, "from"),
        ("qk_norm_report.json", {"dataset": path}, "dataset"),
    ]:
        assert check({name: data}) == f"{name}, {key}, {shown}"
    assert check({}, {"a": "b", "from": path}) == f"model.safetensors (metadata), from, {shown}"


@pytest.mark.parametrize("path", ["/models", "/data/", *PATHS])
def test_a_short_path_is_refused_if_the_key_names_a_path(check, path):
    for key in ("_name_or_path", "vocab_file", "cache_dir", "data_root"):
        assert f"text_config.{key}, contains a path" in check({"config.json": {"text_config": {key: path}}})


@pytest.mark.parametrize("value", NO_PATHS)
def test_text_similar_to_a_path_is_accepted(check, value):
    data = {"a": value, "b": [value], value: {"made_in": value}}
    assert check({"config.json": data, "tokenizer_config.json": data}, {"a": value}, [value]) is None


@pytest.mark.parametrize("path", PATHS)
def test_vocabularies_and_prose_may_look_like_a_path(check, path):
    files = {
        "tokenizer.json": {"model": {"vocab": {path: 1}}},
        "vocab.json": {path: 1},
        "merges.txt": path,
        "README.md": f"Put it in {path}.",
        "chat_template.jinja": path,
        "config.json": {"id2label": {"0": path}, "label2id": {path: 0}},
        "generation_config.json": {"stop_strings": [path]},
        "special_tokens_map.json": {"bos_token": {"content": path}},
        "tokenizer_config.json": {
            "added_tokens_decoder": {"0": {"content": path}},
            "additional_special_tokens": [path],
            "chat_template": path,
            "pad_token": path,
        },
    }
    assert check(files) is None


def test_the_home_folder_and_the_checkpoints_own_are_refused_anywhere(check, tmp_path, monkeypatch):
    home = tmp_path / "ünï"
    monkeypatch.setenv("HOME", str(home))
    for own in (home, tmp_path / "checkpoint"):
        assert "LICENSE, line 2, contains a path of this machine" in check({"LICENSE": f"x\nsee {own}/notes."})
        assert "model.safetensors (names of tensors), line 1, contains a path" in check({}, {}, [f"{own}/x"])
        escaped = check({"tokenizer_config.json": {"bos_token": f"see {own}/notes"}})
        assert "tokenizer_config.json, " in escaped
        assert check({"tokenizer.json": f"{own}/notes"}) is None
        assert check({"LICENSE": f"{own}-other"}) is None


def test_local_origins_are_removed_from_nested_configs_too(tmp_path):
    path = tmp_path / "config.json"
    inner = {"_name_or_path": "/mnt/models/tower", "hidden_size": 8}
    data = {"_name_or_path": "me/llama", "text_config": inner, "towers": [{"name_or_path": str(tmp_path)}, inner]}
    path.write_text(json.dumps(data))
    remove_local_origins(path)
    assert json.loads(path.read_text()) == {
        "_name_or_path": "me/llama",
        "text_config": {"hidden_size": 8},
        "towers": [{}, {"hidden_size": 8}],
    }
