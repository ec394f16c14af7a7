"""Files of weights are read and rewritten as the safetensors library reads them."""

from __future__ import annotations

import errno
import json
import os
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_qknorm.checkpoint.safetensors_files import NewTensor, Weights
from hf_qknorm.files.names import INDEX

TENSORS = {
    "one.safetensors": {"bytes": torch.arange(3, dtype=torch.int8), "größe": torch.randn(5, 3), "none": torch.empty(0)},
    "two.safetensors": {"half": torch.randn(7).bfloat16(), "double": torch.randn(2, dtype=torch.float64)},
}
NEW = torch.randn(24)[::2]  # not contiguous


def saved(folder: Path) -> Weights:
    """Weights in two files, with metadata of other tools."""
    folder.mkdir()
    for file, tensors in TENSORS.items():
        save_file(tensors, folder / file, {"format": "pt", "tool": file})
    index = {
        "metadata": {"total_size": 1, "total_parameters": 1, "tool": "theirs"},
        "weight_map": {name: file for file, tensors in TENSORS.items() for name in tensors},
    }
    (folder / INDEX).write_text(json.dumps(index))
    return Weights(folder)


def failing(error: int) -> object:
    def fail(*_: object, **__: object) -> int:
        raise OSError(error, os.strerror(error))

    return fail


def new(value: Tensor, file: str = "two.safetensors") -> NewTensor:
    return NewTensor(file, (12,), torch.float16, lambda: value)


def by_turns() -> object:
    """A copy by the system that takes two bytes, and fails in every second call."""
    calls = count()

    def copy(source: int, out: int, length: int, offset_src: int) -> int:
        if next(calls) % 2:
            raise OSError(errno.EXDEV, "other file system")
        return os.write(out, os.pread(source, min(length, 2), offset_src))

    return copy


@pytest.mark.parametrize("copy", [None, failing(errno.EXDEV), by_turns()], ids=["system", "process", "by turns"])
def test_rewritten_files_hold_the_same_tensors_and_new_ones(copy, tmp_path, monkeypatch):
    if copy is not None:
        monkeypatch.setattr(os, "copy_file_range", copy, raising=False)
    weights = saved(tmp_path / "source")
    (tmp_path / "out").mkdir()
    weights.rewrite(tmp_path / "out", weights.stored | {"added": new(NEW)})
    again = Weights(tmp_path / "out")
    expected = {**TENSORS["one.safetensors"], **TENSORS["two.safetensors"], "added": NEW.half()}
    found = {**load_file(tmp_path / "out/one.safetensors"), **load_file(tmp_path / "out/two.safetensors")}
    assert found.keys() == again.stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert all(torch.equal(x, tensor) for x in (found[name], again.read(name), again.mapped(name)))
        stored = again.stored[name]
        assert stored.begin % tensor.element_size() == 0 or not stored.nbytes, "as mapped tensors are aligned"
    for file in TENSORS:
        with safe_open(tmp_path / "out" / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt", "tool": file}
        length = int.from_bytes((tmp_path / "out" / file).read_bytes()[:8], "little")
        assert length % 8 == 0
    assert again.index["metadata"] == {"total_size": again.nbytes, "tool": "theirs"}


def test_a_mapped_tensor_is_a_copy_once_it_is_written_to(tmp_path):
    weights = saved(tmp_path / "source")
    weights.mapped("größe").zero_()
    assert torch.equal(weights.read("größe"), TENSORS["one.safetensors"]["größe"])


@pytest.mark.parametrize(
    ("copy", "code"), [(failing(errno.ENOSPC), errno.ENOSPC), (lambda *_, **__: 0, errno.EIO)], ids=["full", "short"]
)
def test_a_copy_that_fails_names_the_file(copy, code, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "copy_file_range", copy, raising=False)
    weights = saved(tmp_path / "source")
    (tmp_path / "out").mkdir()
    with pytest.raises(OSError, match=r"one\.safetensors") as error:
        weights.rewrite(tmp_path / "out", weights.stored)
    assert error.value.errno == code


@pytest.mark.parametrize(
    ("value", "message"),
    [(1e6 * NEW, "added would hold NaN or infinity in float16"), (NEW[:4], r"made with shape \[4\], expected \[12\]")],
)
def test_a_new_tensor_that_does_not_fit_is_refused(value, message, tmp_path):
    weights = saved(tmp_path / "source")
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=message):
        weights.rewrite(tmp_path / "out", {"added": new(value)})


def test_an_index_that_names_another_file_is_refused(tmp_path):
    saved(tmp_path / "source")
    text = (tmp_path / "source" / INDEX).read_text()
    (tmp_path / "source" / INDEX).write_text(text.replace('"half": "two', '"half": "one'))
    with pytest.raises(ValueError, match=r"one\.safetensors: .* says that half is in it, but it is not"):
        Weights(tmp_path / "source")
