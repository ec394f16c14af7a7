"""A checkpoint is read from the same files as transformers reads, with the class that its config names."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_qknorm import convert_checkpoint, export_native, patch_model, plan_conversion
from hf_qknorm.checkpoint.safetensors_files import INDEX, SINGLE
from hf_qknorm.checkpoint.source import open_source
from hf_qknorm.hub.upload_files import open_checkpoint, upload_files
from qknorm_tests.folders import configure, contents, edit, loaded, logits, save
from qknorm_tests.kneed import kneed
from qknorm_tests.tables import as_loaded, sharp_model

MODELS = {"single": {}, "sharded": {"max_shard_size": "60KB"}}


@torch.no_grad()
def shifted(model: PreTrainedModel) -> PreTrainedModel:
    """Change the model's weights in place."""
    for parameter in model.parameters():
        parameter.add_(0.1)
    return model


def twice(model: PreTrainedModel, folder: Path, first: str, last: str) -> Path:
    """Make a folder that holds two saves of different weights."""
    save(model, folder, **MODELS[first])
    kept = contents(folder)
    save(shifted(model), folder, **MODELS[last])
    for name, data in kept.items():  # transformers removes some of them; copies and older releases remove none
        if not (folder / name).exists():
            (folder / name).write_bytes(data)
    assert (folder / SINGLE).is_file()
    assert (folder / INDEX).is_file()
    return folder


@pytest.mark.parametrize(("first", "last"), [("single", "sharded"), ("sharded", "single")])
def test_of_two_saves_the_one_that_transformers_reads_is_read(first, last, tmp_path, caplog):
    source = twice(sharp_model("llama"), tmp_path / "source", first, last)
    read = AutoModelForCausalLM.from_pretrained(source)
    with caplog.at_level(logging.WARNING, "hf_qknorm"):
        plan = plan_conversion(source, tmp_path / "out", "qk_norm")
    assert INDEX in plan.unread
    shards = {path.name for path in source.glob("model-*.safetensors")}
    assert set(plan.unread) == {INDEX, *shards}
    assert f"not read    {', '.join(plan.unread)}: transformers reads other files" in str(plan)
    assert f"{source} holds weights twice: {SINGLE} is read, as transformers does, and these are not" in caplog.text
    assert all(name in caplog.text for name in shards)
    convert_checkpoint(source, tmp_path / "out", "qk_norm")
    assert [path.name for path in (tmp_path / "out").iterdir() if "safetensors" in path.name] == [SINGLE]
    expected = patch_model(read, "qk_norm", attn_implementation="hf_qknorm")
    assert torch.equal(logits(loaded(tmp_path / "out")), logits(expected))


def test_left_over_shards_are_neither_pushed_nor_exported(tmp_path):
    source = twice(as_loaded(patch_model(sharp_model("llama"), "none")), tmp_path / "source", "sharded", "single")
    with open_checkpoint(source) as opened, upload_files(opened, "me/tiny", None) as files:
        assert {name for name in files if "safetensors" in name} == {SINGLE}
    export_native(source, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir() if "safetensors" in path.name} == {SINGLE}
    model = AutoModelForCausalLM.from_pretrained(source)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


def test_variants_and_pickles_are_not_copied(tmp_path):
    source = save(sharp_model("llama"), tmp_path / "source")
    others = ("model.fp16.safetensors", "consolidated.safetensors", "pytorch_model.bin")
    indices = ("model.safetensors.index.fp16.json", "pytorch_model.bin.index.json")
    for name in (*others, *indices):
        (source / name).write_text("{}")
    plan = plan_conversion(source, tmp_path / "out")
    assert plan.unread == ("consolidated.safetensors", "model.fp16.safetensors")
    assert set(plan.left) >= {*others, *indices}
    convert_checkpoint(source, tmp_path / "out")
    assert not {*others, *indices} & set(os.listdir(tmp_path / "out"))


@pytest.mark.parametrize("settings", [{"max_new_tokens": "x"}, {"cache_implementation": 3}], ids=str)
def test_settings_that_do_not_load_are_refused(settings, tmp_path):
    save(sharp_model("llama"), tmp_path / "source")
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(Exception) as loading:  # noqa: PT011  # whatever transformers raises
        AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    assert loading
    with pytest.raises(
        ValueError, match=r"source.generation_config.json: a checkpoint with these settings does not load"
    ):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", "soft_cap")
    assert not (tmp_path / "out").exists()


def test_weights_that_transformers_would_prefer_are_refused(tmp_path):
    source = save(sharp_model("llama"), tmp_path / "source")
    configure(source, transformers_weights="other.safetensors")
    with pytest.raises(ValueError, match=r'config.json: "transformers_weights" is \'other.safetensors\', which is not'):
        convert_checkpoint(source, tmp_path / "out")
    configure(source, transformers_weights=SINGLE)
    plan_conversion(source, tmp_path / "out")
    (source / "shard-00000-model-00001-of-00001.safetensors").write_bytes((source / SINGLE).read_bytes())
    with pytest.raises(ValueError, match=r"shard-00000-.*safetensors is of a distributed checkpoint"):
        convert_checkpoint(source, tmp_path / "out")


@pytest.mark.parametrize("architectures", [None, [], ["Nobody"], ["PreTrainedModel"], ["PretrainedConfig"]])
def test_a_config_names_a_class_of_transformers(architectures, tmp_path):
    source = save(sharp_model("llama"), tmp_path / "source")
    configure(source, architectures=architectures)
    message = r'source/config.json: "architectures" is .*, expected the name of a class of transformers for .*\'llama\''
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("damage", ["absent", "shape"])
def test_incomplete_pickles_are_refused(damage, tmp_path):
    model = sharp_model("llama")
    source = save(model, tmp_path / "source")
    state = model.state_dict()
    if damage == "absent":
        del state["model.norm.weight"]
    else:
        state["model.norm.weight"] = torch.ones(3)
    torch.save(state, source / "pytorch_model.bin")
    (source / SINGLE).unlink()
    with pytest.raises(ValueError, match=r"in the pickled weights, the values of model.norm.weight (are missing|have)"):
        convert_checkpoint(source, tmp_path / "out", allow_pickle=True)
    assert os.listdir(tmp_path) == ["source"]


class Touch:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


PICKLE, PICKLES = "pytorch_model.bin", "pytorch_model.bin.index.json"
UNREADABLE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "half": (PICKLE, lambda data: data[: len(data) // 2]),
    "empty": (PICKLE, lambda data: b""),
    "junk": (PICKLE, lambda data: b"junk"),
    "code": (PICKLE, lambda data: pickle.dumps({"x": Touch(Path("ran"))}, protocol=2)),
    "a list": (PICKLE, lambda data: pickle.dumps([1], protocol=2)),
    "index without metadata": (PICKLES, lambda data: b'{"weight_map": {"x": "x.bin"}}'),
    "index without map": (PICKLES, lambda data: b'{"metadata": {}}'),
    "index of a list": (PICKLES, lambda data: b"[]"),
    "index of nothing": (PICKLES, lambda data: b""),
}


@pytest.mark.parametrize("damage", UNREADABLE)
def test_unreadable_pickles_are_named(damage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, change = UNREADABLE[damage]
    source = save(sharp_model("llama"), tmp_path / "source")
    torch.save(sharp_model("llama").state_dict(), source / PICKLE)
    data = (source / PICKLE).read_bytes()
    for file in (SINGLE, PICKLE):
        (source / file).unlink()
    (source / name).write_bytes(change(data))
    with pytest.raises(ValueError, match=rf"{source / name} .*download it again") as error:
        convert_checkpoint(source, tmp_path / "out", allow_pickle=True)
    assert "weights_only" not in str(error.value)
    assert os.listdir(tmp_path) == ["source"]


def test_the_unreadable_one_of_several_pickles_is_named(tmp_path):
    source = save(sharp_model("llama"), tmp_path / "source")
    (source / SINGLE).unlink()
    files = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    torch.save({"lm_head.weight": sharp_model("llama").lm_head.weight}, source / files[0])
    (source / files[1]).write_bytes(b"")
    weight_map = {"lm_head.weight": files[0], "model.norm.weight": files[1]}
    (source / PICKLES).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(ValueError, match=rf"{source / files[1]} is truncated or corrupted"):
        convert_checkpoint(source, tmp_path / "out", allow_pickle=True)


def test_weights_without_permission_are_not_called_corrupted(tmp_path, monkeypatch):
    source = save(sharp_model("llama"), tmp_path / "source")
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:  # root may read anything
        if path.name == SINGLE:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError, match=rf"Permission denied: '{source / SINGLE}'"):
        convert_checkpoint(source, tmp_path / "out")


@pytest.mark.parametrize("made", ["rms", "layer"])
def test_knees_are_checked(made, tmp_path):
    folder = save(kneed(made), tmp_path / "source")
    with open_source(folder) as source:
        source.check_gains()
    name = next(name for name in load_file(folder / SINGLE) if name.endswith("q_norm.knee"))
    edit(folder, lambda weights: weights[name][2:].fill_(0.0))
    with (
        pytest.raises(ValueError, match=rf"{name} is .*, expected three finite numbers"),
        open_source(folder) as source,
    ):
        source.check_gains()


def test_a_repeated_entry_in_a_header_is_refused(tmp_path):
    source = save(sharp_model("llama"), tmp_path / "source")
    data = (source / SINGLE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].decode().rstrip()
    entry = json.dumps(json.loads(header)["model.norm.weight"])
    header = (header[:-1] + f',"lm_head.weight":{entry}}}').encode()
    (source / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    with pytest.raises(ValueError, match=r"model.safetensors"):
        convert_checkpoint(source, tmp_path / "out")
