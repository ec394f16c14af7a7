"""Checkpoints larger than memory: the limits of memory, and conversions that read layers from the disk."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from hf_qknorm import Scheme, convert_checkpoint
from hf_qknorm.checkpoint import memory
from hf_qknorm.checkpoint.memory import memory_left, parse_size, place_weights, working_memory
from hf_qknorm.checkpoint.source import open_source
from hf_qknorm.convert import checkpoint
from hf_qknorm.inspection.inspect import inspect_checkpoint
from hf_qknorm.measure import measured_checkpoint
from qknorm_tests.folders import contents, save, save_with_tokenizer
from qknorm_tests.tables import sharp_model
from qknorm_tests.tiny import tiny_model

KNEE = Scheme(q="rms", k="rms")
BATCHES = [torch.randint(3, 60, (1, 16), generator=torch.Generator().manual_seed(seed)) for seed in range(9)]


def tiny(folder: Path, model_type: str = "llama") -> Path:
    model = tiny_model("mixtral") if model_type == "mixtral" else sharp_model(model_type)
    return save(model, folder / "source", max_shard_size="60KB")


def least(folder: Path, length: int = 16) -> int:
    """Return the least memory of a calibration: one sequence, and the largest tensor."""
    with open_source(folder) as source:
        largest = max(tensor.nbytes for tensor in source.weights.stored.values())
        return int((largest + working_memory(source, 1, length)) / memory.USABLE) + 1


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[PreTrainedModel]]:
    """Return a function that limits conversions to some bytes, and returns the list of models that they calibrate."""
    calibrate = checkpoint.calibrate

    def limit(left: int) -> list[PreTrainedModel]:
        models: list[PreTrainedModel] = []

        def seen(model: PreTrainedModel, *rest: Any, **options: Any) -> Any:
            models.append(model)
            return calibrate(model, *rest, **options)

        monkeypatch.setattr(checkpoint, "calibrate", seen)
        monkeypatch.setattr(checkpoint, "memory_left", lambda max_memory: left)
        return models

    return limit


@pytest.mark.costly
@pytest.mark.parametrize(("model_type", "share"), [("llama", 0.4), ("gpt2", 0), ("mixtral", 0.4)])
def test_layers_on_the_disk_give_the_same_result(model_type, share, tmp_path, limited):
    """Mixtral's experts are joined on loading, GPT-2's embedding is also its head."""
    folder = tiny(tmp_path, model_type)
    expected = convert_checkpoint(folder, tmp_path / "in memory", KNEE, calibration=BATCHES)
    with open_source(folder) as source:
        models = limited(least(folder) + int(share * source.weights.nbytes))
    assert convert_checkpoint(folder, tmp_path / "streamed", KNEE, calibration=BATCHES) == expected
    (model,) = models
    assert any(parameter.is_meta for parameter in model.parameters())
    assert contents(tmp_path / "streamed") == contents(tmp_path / "in memory")
    assert sorted(os.listdir(tmp_path)) == ["in memory", "source", "streamed"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_stopped_conversion_leaves_nothing(error, tmp_path, limited, monkeypatch):
    folder = tiny(tmp_path, "mixtral")
    limited(least(folder))
    there: list[str] = []

    def stopped(*rest: Any, **options: Any) -> None:
        (staging,) = (path for path in tmp_path.iterdir() if path != folder)
        there.extend(path.name for path in (staging / "new").iterdir())
        raise error

    monkeypatch.setattr(checkpoint, "calibrate", stopped)
    with pytest.raises(error):
        convert_checkpoint(folder, tmp_path / "out", KNEE, calibration=BATCHES)
    assert any("experts" in name for name in there)
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize(
    ("share", "limits", "message"),
    [
        (0.5, [], r"of memory are left, too little for this checkpoint: its largest tensor and one sequence of 16"),
        (1, [10**5], r"address space, and the limits of this process leave 0\.1 MB.*ulimit -v"),
    ],
    ids=["memory", "limits"],
)
def test_refusals_come_before_weights_are_read(share, limits, message, tmp_path, limited, monkeypatch):
    def loaded(*rest: Any, **options: Any) -> None:
        raise AssertionError("the weights were read")

    folder = tiny(tmp_path)
    limited(int(share * least(folder)))
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", loaded)
    monkeypatch.setattr(memory, "_process_limits", lambda: limits)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(folder, tmp_path / "out", KNEE, calibration=BATCHES)
    assert os.listdir(tmp_path) == ["source"]


def test_inspecting_layers_on_the_disk(tmp_path, monkeypatch):
    folder = save_with_tokenizer(sharp_model("llama", vocab_size=300), tmp_path / "source", max_shard_size="60KB")
    text = tmp_path / "text.txt"
    text.write_text("to be, or not to be: that is the question. " * 20)
    found = []
    for left in (2**33, least(folder, length=128)):
        monkeypatch.setattr(measured_checkpoint, "memory_left", lambda max_memory, left=left: left)
        found.append(inspect_checkpoint(str(folder), texts=str(text), tokens=512))
    whole, streamed = found
    assert streamed.base.loss == pytest.approx(whole.base.loss, abs=1e-5)
    assert streamed.advice.scheme == whole.advice.scheme


SIZES = {
    "8GB": 8 * 10**9,
    "8 gb": 8 * 10**9,
    "1.5GiB": 3 * 2**29,
    "500MiB": 500 * 2**20,
    "2048": 2048,
    12: 12,
    ".5KB": 500,
}


@pytest.mark.parametrize("text", SIZES, ids=repr)
def test_sizes(text):
    assert parse_size(text) == SIZES[text]


INVALID = ["", "much", "0GB", "-1GB", "8 cats", "1e9", 0, -5, 1.5, True, "9" * 40, "9" * 400, 10**400]


@pytest.mark.parametrize("text", INVALID, ids=repr)
def test_invalid_sizes(text):
    with pytest.raises(
        ValueError, match=r'max_memory=.* is no size of memory: expected bytes, or a text such as "8GB"'
    ):
        parse_size(text)


def test_the_rest_of_a_limit(monkeypatch):
    machine = memory.psutil.virtual_memory()._replace(available=10**12)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(memory, "_cgroup_limits", list)
    monkeypatch.setattr(memory, "_process_limits", list)
    assert 0 < memory_left("64GB") < 64 * 10**9
    assert memory_left(None) == memory_left("100TB") == 10**12
    with pytest.raises(ValueError, match=r"max_memory='1MB' is less than the .* that this process holds already"):
        memory_left("1MB")


def cgroup(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_limits_of_cgroups(tmp_path):
    """Parent cgroups count; cached files are free memory; a cgroup without a limit, or a missing one, is ignored."""
    process = tmp_path / "cgroup"
    process.write_text("9:name=systemd:/\n4:cpu,memory:/a/b\n0::/c/d\n")
    stat = "total_inactive_file 30\ninactive_file 7\n"
    one = {"memory__usage_in_bytes": "100\n", "memory__stat": stat}
    cgroup(tmp_path / "memory/a/b", memory__limit_in_bytes=f"{2**63 - 4096}\n", **one)
    cgroup(tmp_path / "memory/a", memory__limit_in_bytes="150\n", **one)
    cgroup(tmp_path / "c/d", memory__max="max\n", memory__current="5\n", memory__stat=stat)
    cgroup(tmp_path / "c", memory__max="20\n", memory__current="25\n", memory__stat=stat)
    assert sorted(memory._cgroup_limits(process, tmp_path)) == [2, 80]
    assert memory._cgroup_limits(tmp_path / "none", tmp_path) == []


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_converted_weights_need_room_on_the_disk(model_type, tmp_path, monkeypatch):
    folder = tiny(tmp_path, model_type)
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    with open_source(folder) as source:
        placing = place_weights(source, 16, least(folder), tmp_path / "out")
        refusal = pytest.raises(OSError, match=r"that transformers computes with, needs .* has 0\.0 MB free")
        with refusal if model_type == "mixtral" else nullcontext(), placing as (_, sequences):
            assert sequences == 1
    assert os.listdir(tmp_path) == ["source"]


def test_norms_are_not_folded_into_weights_on_the_disk(tmp_path, limited):
    folder = tiny(tmp_path)
    limited(least(folder))
    with pytest.raises(ValueError, match="pre_norm=False folds a norm into weights that are not in memory"):
        convert_checkpoint(folder, tmp_path / "out", "qkv_norm", calibration=BATCHES)
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_limits_of_the_process(kind, monkeypatch):
    assert memory_left(None) > 2**20
    getrlimit = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (2**20, 2**20) if asked == kind else getrlimit(asked))
    assert memory_left(None) == 0
