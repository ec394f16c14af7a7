"""`push_to_hub` against a local Hub: the files of each commit, and files that are never uploaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm import Calibration, Scheme, calibrate, patch_model, push_to_hub
from hf_qknorm.convert.card import PLACEHOLDER, write_card
from hf_qknorm.files.names import PLOT, REPORT
from qknorm_tests.folders import contents, save
from qknorm_tests.push_cases import SHARDS, checkpoint, logits, patched
from qknorm_tests.tiny import tiny_model

CODE, WEIGHTS, PROCESSOR = "modeling_qknorm.py", "model.safetensors", "preprocessor_config.json"
BATCHES = [torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(i)) for i in range(3)]
LITTER = "optimizer.pt trainer_state.json training_args.bin pytorch_model.bin .env notes.txt events.out secret.json"


def litter(folder: Path) -> None:
    """Add files that a training folder often has and that must stay private."""
    for name in LITTER.split():
        (folder / name).write_text("{}")
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "config.json").write_text("{}")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "out")


OLD = (REPORT, PLOT, "plot.png", "model.gguf", "notes.md")  # of an earlier push


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_one_commit_has_every_file_that_is_needed(hub, tmp_path, sharded):
    folder = checkpoint(tmp_path / "out", **({"max_shard_size": "200KB"} if sharded else {}))
    litter(folder)
    (folder / PROCESSOR).write_text("{}\n")
    before = contents(folder)
    weights = {name for name in before if name.endswith(".safetensors")}
    assert len(weights) == (3 if sharded else 1)
    url = push_to_hub(folder, "me/tiny")
    (commit,) = hub.commits("me/tiny")
    assert url == f"{hub.url}/me/tiny/commit/{commit.oid}"
    kept = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md", "LICENSE"}
    kept |= {"chat_template.jinja", "additional_chat_templates/tools.jinja"} | weights
    if sharded:
        kept.add("model.safetensors.index.json")
    assert set(commit.changed) == kept | {CODE, PROCESSOR}
    assert commit.files[PROCESSOR] == b"{}\n"
    assert contents(folder) == before
    for name in kept - {"README.md", "config.json"}:
        assert commit.files[name] == before[name]
    card = commit.files["README.md"].decode()
    assert 'from_pretrained("me/tiny"' in card
    assert "license: mit" in card
    assert "AutoModelForCausalLM" in json.loads(commit.files["config.json"])["auto_map"]
    compile(commit.files[CODE], CODE, "exec")
    for name, data in commit.files.items():
        for secret in (str(tmp_path), str(Path.home()), "hf_writes"):
            assert secret.encode() not in data, name
    loaded = AutoModelForCausalLM.from_pretrained("me/tiny")
    assert torch.equal(logits(loaded), logits(AutoModelForCausalLM.from_pretrained(folder)))
    assert AutoTokenizer.from_pretrained("me/tiny")("abc") == AutoTokenizer.from_pretrained(folder)("abc")


def test_a_second_push_commits_changed_files_only(hub, out):
    url = push_to_hub(out, "me/tiny")
    sent = list(hub.received)
    assert push_to_hub(out, "me/tiny") == url
    assert len(hub.commits("me/tiny")) == 1
    assert hub.received == sent
    (out / "LICENSE").write_text("MIT, but newer")
    push_to_hub(out, "me/tiny", commit_message="A newer licence")
    last = hub.commits("me/tiny")[-1]
    assert (last.title, last.changed) == ("A newer licence", ("LICENSE",))
    assert hub.received == sent


def test_weights_and_reports_of_an_earlier_push_are_deleted(hub, tmp_path):
    """A stale `model.safetensors` would be loaded instead of the shards that the index names."""
    push_to_hub(checkpoint(tmp_path / "one"), "me/tiny")
    hub.repos["me/tiny"].branches["main"][-1].files.update(dict.fromkeys(OLD, b"{}"))
    push_to_hub(checkpoint(tmp_path / "two", max_shard_size="200KB"), "me/tiny")
    last = hub.commits("me/tiny")[-1]
    assert set(last.changed) == {WEIGHTS, REPORT, PLOT, "model.safetensors.index.json", *SHARDS}
    assert {WEIGHTS, REPORT, PLOT} & set(last.files) == set()
    assert {"model.gguf", "plot.png", "notes.md", *SHARDS} <= set(last.files)


def test_an_edited_card_keeps_its_text(hub, out):
    write_card(out)
    card = (out / "README.md").read_text()
    assert PLACEHOLDER in card
    (out / "README.md").write_text(f"{card}\nMy own words.\n")
    push_to_hub(out, "me/tiny")
    (commit,) = hub.commits("me/tiny")
    pushed = commit.files["README.md"].decode()
    assert pushed.endswith("\nMy own words.\n")
    assert 'from_pretrained("me/tiny")' in pushed
    assert PLACEHOLDER not in pushed
    assert (out / "README.md").read_text() == f"{card}\nMy own words.\n"


@pytest.mark.parametrize(("private", "asked"), [(None, None), (True, "private"), (False, "public")])
def test_visibility_is_requested_only_if_private_is_given(hub, out, private, asked):
    push_to_hub(out, "me/tiny", private=private)
    (created,) = hub.created
    visibility = created.get("visibility", {True: "private", False: "public"}.get(created.get("private")))
    assert visibility == asked
    push_to_hub(out, "me/tiny", private=private)


def test_a_name_without_owner_is_the_users_and_tokens_may_be_fine_grained(hub, out, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    push_to_hub(out, "tiny", token="hf_mine")
    push_to_hub(out, "lab/tiny", token="hf_elsewhere")
    assert sorted(hub.repos) == ["lab/tiny", "me/tiny"]


def test_a_push_to_a_branch(hub, out):
    branches = hub.create("me/tiny").branches
    branches["next"] = list(branches["main"])
    push_to_hub(out, "me/tiny", revision="next")
    assert len(hub.commits("me/tiny", "next")) == 1
    assert hub.commits("me/tiny") == []


def test_a_model_in_memory_is_pushed_with_its_code_and_its_card(hub, tmp_path, caplog):
    model = patch_model(AutoModelForCausalLM.from_pretrained(save(tiny_model("llama"), tmp_path / "base")), "qk_norm")
    push_to_hub(model, "me/tiny")
    assert "me/tiny gets no tokenizer: tokenizer.push_to_hub('me/tiny') adds one" in caplog.text
    (commit,) = hub.commits("me/tiny")
    assert {CODE, WEIGHTS, "config.json", "README.md"} <= set(commit.changed)
    assert not [name for name, data in commit.files.items() if str(tmp_path).encode() in data]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained("me/tiny")), logits(model))


def test_a_dry_run_lists_the_files_and_sends_nothing(hub, out, capsys, monkeypatch):
    litter(out)
    monkeypatch.delenv("HF_TOKEN")
    assert push_to_hub(out, "me/tiny", dry_run=True) is None
    listed = [line.split()[-1] for line in capsys.readouterr().out.splitlines()]
    assert hub.requests == []
    monkeypatch.setenv("HF_TOKEN", "hf_writes")
    push_to_hub(out, "me/tiny")
    assert sorted(hub.commits("me/tiny")[-1].changed) == sorted(listed)


@pytest.mark.parametrize("way", ["push_to_hub", "save_pretrained"])
def test_transformers_own_push_uploads_the_code_too(hub, way, tmp_path):
    model = patched()
    if way == "push_to_hub":
        model.push_to_hub("me/tiny")
    else:
        model.save_pretrained(tmp_path / "out", push_to_hub=True, repo_id="me/tiny")
    files = hub.commits("me/tiny")[-1].files
    assert json.loads(files["config.json"])["auto_map"]["AutoConfig"] == "modeling_qknorm.QKNormLlamaConfig"
    assert b"class QKNormModel" in files[CODE]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained("me/tiny")), logits(model))


def calibrated():
    model = patched()
    return model, calibrate(model, BATCHES, knee=0)


@pytest.mark.parametrize("how", ["ours", "save_pretrained", "push_to_hub"])
def test_a_model_in_memory_is_pushed_with_its_report(hub, tmp_path, how):
    model, report = calibrated()
    checkpoint(tmp_path / "out")
    model.save_pretrained(tmp_path / "out")
    if how == "ours":
        push_to_hub(model, "me/tiny")
    elif how == "save_pretrained":
        model.save_pretrained(tmp_path / "out", push_to_hub=True, repo_id="me/tiny")
    else:
        model.push_to_hub("me/tiny")
    files = hub.commits("me/tiny")[-1].files
    assert Calibration.from_dict(json.loads(files[REPORT])) == report
    loaded = AutoModelForCausalLM.from_pretrained("me/tiny")
    loaded.save_pretrained(tmp_path / "again")
    assert Calibration.load(tmp_path / "again" / REPORT) == report


def test_after_training_the_card_says_that_its_numbers_are_those_of_the_conversion(tmp_path):
    model, report = calibrated()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(1e-4)
    model.save_pretrained(tmp_path)
    assert [path.name for path in write_card(tmp_path)] == ["README.md", PLOT]
    card = (tmp_path / "README.md").read_text()
    assert "All numbers were measured at conversion." in card
    assert f"{report.loss:.3f}" in card


def test_a_card_of_another_scheme_is_not_pushed(hub, tmp_path, caplog):
    """Also without a report, whose numbers would tell."""
    out = checkpoint(tmp_path / "out")
    write_card(out)
    card = (out / "README.md").read_text()
    (out / "README.md").write_text(f"{card}\nMy own words.\n")
    patch_model(tiny_model("llama", vocab_size=300), Scheme(softcap=30.0)).save_pretrained(out)
    push_to_hub(out, "me/tiny")
    assert "a new card is uploaded, without its edits" in caplog.text
    pushed = hub.commits("me/tiny")[-1].files["README.md"].decode()
    assert "softcap=30.0" in pushed
    assert "50" not in pushed.partition("## Changes")[2].partition("##")[0]
