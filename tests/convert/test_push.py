"""`push_to_hub`: the files of its commit, files that are never uploaded, and refusals that change nothing."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_qknorm import Calibration, Scheme, calibrate, cli, patch_model, push_to_hub
from hf_qknorm.convert.card import PLACEHOLDER, write_card
from hf_qknorm.files.names import PLOT, REPORT
from qknorm_tests.folders import contents, save, save_with_tokenizer
from qknorm_tests.hub import Hub
from qknorm_tests.kneed import logits
from qknorm_tests.tables import randomise
from qknorm_tests.tiny import tiny_model

httpx = import_module(HfHubHTTPError.__bases__[0].__module__)  # the version that the Hub's client uses
CODE, WEIGHTS, PROCESSOR = "modeling_qknorm.py", "model.safetensors", "preprocessor_config.json"
SHARDS = {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}  # of `checkpoint(..., max_shard_size="200KB")`
BATCHES = [torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(i)) for i in range(3)]
LITTER = "optimizer.pt trainer_state.json training_args.bin pytorch_model.bin .env notes.txt events.out secret.json"
EDITED = "\nMy own words.\n"


def patched() -> PreTrainedModel:
    return randomise(patch_model(tiny_model("llama", vocab_size=300), "qk_norm_cap"))


def checkpoint(folder: Path, **options: Any) -> Path:
    """Save a patched checkpoint with tokenizer, card, licence and chat templates; return the folder."""
    save_with_tokenizer(patched(), folder, **options)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n\nA model of the tests.\n")
    (folder / "LICENSE").write_text("MIT")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    return folder


def litter(folder: Path) -> None:
    """Add files that a training folder often has and that must stay private."""
    for name in LITTER.split():
        (folder / name).write_text("{}")
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "config.json").write_text("{}")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "out")


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_one_commit_has_every_file_that_is_needed(hub, tmp_path, sharded):
    folder = checkpoint(tmp_path / "out", **({"max_shard_size": "200KB"} if sharded else {}))
    litter(folder)
    (folder / PROCESSOR).write_text("{}\n")
    before = contents(folder)
    assert push_to_hub(folder, "me/tiny") == "https://huggingface.co/me/tiny/commit/1"
    (commit,) = hub.repos["me/tiny"]["main"]
    kept = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md", "LICENSE"}
    kept |= {"chat_template.jinja", "additional_chat_templates/tools.jinja", PROCESSOR}
    kept |= {*SHARDS, f"{WEIGHTS}.index.json"} if sharded else {WEIGHTS}
    assert commit.changed == kept | {CODE}
    assert contents(folder) == before
    for name in kept - {"README.md", "config.json"}:
        assert commit.files[name] == before[name]
    card = commit.files["README.md"].decode()
    assert 'from_pretrained("me/tiny"' in card
    assert "license: mit" in card
    assert "AutoModelForCausalLM" in json.loads(commit.files["config.json"])["auto_map"]
    compile(commit.files[CODE], CODE, "exec")
    for name, data in commit.files.items():
        for secret in (str(tmp_path), str(Path.home())):
            assert secret.encode() not in data, name
    got = hub.save("me/tiny", tmp_path / "got")
    again, model = (AutoModelForCausalLM.from_pretrained(place) for place in (got, folder))
    assert torch.equal(logits(again), logits(model))
    assert AutoTokenizer.from_pretrained(got)("abc") == AutoTokenizer.from_pretrained(folder)("abc")


def test_weights_and_reports_of_an_earlier_push_are_deleted(hub, tmp_path):
    """A stale `model.safetensors` would be loaded instead of the shards that the index names."""
    push_to_hub(checkpoint(tmp_path / "one"), "me/tiny")
    hub.files("me/tiny").update(dict.fromkeys((REPORT, PLOT, "plot.png", "model.gguf", "notes.md"), b"{}"))
    push_to_hub(checkpoint(tmp_path / "two", max_shard_size="200KB"), "me/tiny", commit_message="Shards")
    assert hub.repos["me/tiny"]["main"][-1].title == "Shards"
    assert {WEIGHTS, REPORT, PLOT} & hub.files("me/tiny").keys() == set()
    assert {"model.gguf", "plot.png", "notes.md", *SHARDS} <= hub.files("me/tiny").keys()


def test_an_edited_card_keeps_its_text(hub, out):
    write_card(out)
    card = (out / "README.md").read_text()
    assert PLACEHOLDER in card
    (out / "README.md").write_text(card + EDITED)
    push_to_hub(out, "me/tiny")
    pushed = hub.files("me/tiny")["README.md"].decode()
    assert pushed.endswith(EDITED)
    assert 'from_pretrained("me/tiny")' in pushed
    assert PLACEHOLDER not in pushed
    assert (out / "README.md").read_text() == card + EDITED


@pytest.mark.parametrize("stale", ["scheme", "results"])
def test_a_card_of_another_scheme_or_with_other_results_is_not_pushed(hub, out, caplog, stale):
    model = patched()
    calibrate(model, BATCHES, knee=0)
    model.save_pretrained(out)
    write_card(out)
    (out / "README.md").write_text((out / "README.md").read_text() + EDITED)
    if stale == "scheme":
        model = patch_model(tiny_model("llama", vocab_size=300), Scheme(softcap=30.0))
    else:
        calibrate(model, BATCHES[:1], knee=0)
    model.save_pretrained(out)
    push_to_hub(out, "me/tiny")
    assert "a new card is uploaded, without its edits" in caplog.text
    pushed = hub.files("me/tiny")["README.md"].decode()
    assert ("softcap=30.0" in pushed) is (stale == "scheme")
    assert not pushed.endswith(EDITED)


def test_where_a_push_goes(hub, out, capsys):
    for private in (None, True, False):
        for _ in range(2):
            push_to_hub(out, f"me/{private}", private=private)
    asked = [options["private"] for method, options in hub.calls if method == "create_repo"]
    assert asked == [None, None, True, True, False, False]
    hub.repos["me/None"]["next"] = list(hub.repos["me/None"]["main"])
    push_to_hub(out, "me/None", revision="next")
    assert [len(commits) for commits in hub.repos["me/None"].values()] == [2, 3]
    assert cli.main(["push", str(out), "tiny", "--private", "--message", "First"]) == 0
    assert capsys.readouterr().out == "pushed: https://huggingface.co/me/tiny/commit/1\n"
    assert hub.private["me/tiny"]
    assert hub.repos["me/tiny"]["main"][0].title == "First"


def test_a_model_without_a_tokenizer_is_pushed_with_a_warning_and_its_card(hub, tmp_path, caplog):
    model = patch_model(AutoModelForCausalLM.from_pretrained(save(tiny_model("llama"), tmp_path / "base")), "qk_norm")
    push_to_hub(model, "me/tiny")
    assert "me/tiny gets no tokenizer: tokenizer.push_to_hub('me/tiny') adds one" in caplog.text
    assert {CODE, WEIGHTS, "config.json", "README.md"} <= hub.files("me/tiny").keys()
    assert not [name for name, data in hub.files("me/tiny").items() if str(tmp_path).encode() in data]


def test_a_dry_run_lists_the_files_and_sends_nothing(hub, out, capsys):
    litter(out)
    assert push_to_hub(out, "me/tiny", dry_run=True) is None
    printed = capsys.readouterr().out
    listed = [line.split()[-1] for line in printed.splitlines()]
    assert cli.main(["push", str(out), "me/tiny", "--dry-run"]) == 0
    assert capsys.readouterr().out == f"{printed}\ndry run: nothing was uploaded\n"
    assert hub.calls == []
    push_to_hub(out, "me/tiny")
    assert sorted(hub.files("me/tiny")) == sorted(listed)


@pytest.mark.parametrize("way", ["ours", "push_to_hub", "save_pretrained"])
def test_a_model_in_memory_is_pushed_with_its_code_and_its_report(hub, tmp_path, way):
    """Also by transformers' own ways."""
    model = patched()
    report = calibrate(model, BATCHES, knee=0)
    if way == "ours":
        push_to_hub(model, "me/tiny")
    elif way == "push_to_hub":
        model.push_to_hub("me/tiny")
    else:
        model.save_pretrained(tmp_path / "out", push_to_hub=True, repo_id="me/tiny")
    files = hub.files("me/tiny")
    assert json.loads(files["config.json"])["auto_map"]["AutoConfig"] == "modeling_qknorm.QKNormLlamaConfig"
    assert b"class QKNormModel" in files[CODE]
    assert Calibration.from_dict(json.loads(files[REPORT])) == report
    loaded = AutoModelForCausalLM.from_pretrained(hub.save("me/tiny", tmp_path / "got"))
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "again")
    assert Calibration.load(tmp_path / "again" / REPORT) == report


def no_gain(hub: Hub, out: Path) -> None:
    weights = load_file(out / WEIGHTS)
    del weights["model.layers.1.self_attn.q_norm.weight"]
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})


def linked_out(hub: Hub, out: Path) -> None:
    (out.parent / "elsewhere").write_text("{}")
    (out / "tokenizer.json").unlink()
    (out / "tokenizer.json").symlink_to(out.parent / "elsewhere")


def other_size(hub: Hub, out: Path) -> None:
    data = json.loads((out / "config.json").read_text()) | {"num_hidden_layers": 7}
    hub.create("me/tiny", **{"config.json": json.dumps(data).encode()})


def holding(private: bool = False, **files: bytes) -> Any:
    return lambda hub, out: hub.create("me/tiny", private, **files)


REFUSALS: list[tuple[Any, Any, type[Exception], str]] = [
    ({"repo_id": "me/tiny/more"}, None, ValueError, "the repository is 'me/tiny/more', expected a name on the Hub, as"),
    ({"repo_id": ""}, None, ValueError, "the repository is '', expected a name on the Hub"),
    ({"repo_id": None}, None, ValueError, "the repository is None, expected a name on the Hub"),
    ({}, holding(**{"config.json": b'{"model_type": "llama"}'}), ValueError, "(model_type 'llama', expected qknorm_ll"),
    ({}, holding(**{"config.json": b"[]"}), ValueError, "holds another model (model_type None, expected qknorm_llama)"),
    ({}, other_size, ValueError, "holds another model (num_hidden_layers 7, expected 2)"),
    ({}, holding(**{"pytorch_model.bin": b""}), ValueError, "holds another model (pytorch_model.bin)"),
    ({"private": True}, holding(), ValueError, "me/tiny is public: make it private in its settings"),
    ({"checkpoint": "./nowhere"}, None, FileNotFoundError, "nowhere is no folder"),
    ({"checkpoint": torch.nn.Linear(2, 2)}, None, ValueError, "a Linear can't be pushed"),
    ({"checkpoint": tiny_model("llama")}, None, ValueError, "a LlamaForCausalLM can't be pushed: pass a model patched"),
    ({}, lambda hub, out: save(tiny_model("llama", vocab_size=300), out), ValueError, "plain llama: convert it first"),
    ({}, no_gain, ValueError, "model.layers.1.self_attn.q_norm.weight"),
    ({}, linked_out, ValueError, "tokenizer.json is a link to"),
]


@pytest.mark.parametrize(("options", "change", "kind", "message"), REFUSALS, ids=[x[-1][:40] for x in REFUSALS])
def test_a_refused_push_commits_nothing(hub, out, options, change, kind, message):
    if change is not None:
        change(hub, out)
    before = {name: dict(branches) for name, branches in hub.repos.items()}
    with pytest.raises(kind) as error:
        push_to_hub(**{"checkpoint": out, "repo_id": "me/tiny"} | options)
    assert message in str(error.value)
    assert hub.repos == before
    assert "create_commit" not in dict(hub.calls)


def answer(status: int, message: str) -> HfHubHTTPError:
    request = httpx.Request("POST", "https://huggingface.co")
    return HfHubHTTPError("A\nparagraph", response=httpx.Response(status, request=request), server_message=message)


def in_a_thread(cause: Exception) -> RuntimeError:
    error = RuntimeError("Error while uploading")
    error.__cause__ = cause
    return error


FAILURES: list[tuple[str, Exception, type[Exception], str]] = [
    ("create_repo", answer(401, "Invalid username"), PermissionError, "denied access (401 Invalid username): l"),
    ("create_commit", answer(403, "No rights"), PermissionError, "with a token that has write access"),
    ("model_info", answer(404, "Invalid rev id"), OSError, "the Hub answered 404 Invalid rev id. The same command may"),
    ("create_commit", answer(503, ""), OSError, "the Hub answered 503 Service Unavailable. The same command may be"),
    ("create_repo", httpx.ConnectError("refused\n"), ConnectionError, "no connection to the Hub (ConnectError: refu"),
    ("create_commit", in_a_thread(answer(403, "")), OSError, "the upload failed (HfHubHTTPError: A). The same command"),
]


@pytest.mark.parametrize(("method", "failure", "kind", "message"), FAILURES, ids=[x[-1][:40] for x in FAILURES])
def test_a_failed_push_is_one_line_and_may_be_repeated(hub, out, method, failure, kind, message):
    hub.failures[method] = failure
    with pytest.raises(kind) as error:
        push_to_hub(out, "me/tiny")
    assert str(error.value).startswith("me/tiny: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    hub.failures.clear()
    push_to_hub(out, "me/tiny")
    assert len(hub.repos["me/tiny"]["main"]) == 1
