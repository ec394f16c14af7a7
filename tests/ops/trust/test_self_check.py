"""The self-check passes sound kernels, finds errors of a few per cent, and leaves its caller's state alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton, which comes with torch on CUDA and with the test extra")
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_qknorm.ops import library
from hf_qknorm.ops.triton import attention, attention_decode, norm_rope, schedule
from hf_qknorm.ops.trust import problems
from hf_qknorm.ops.trust.code_path import CodePath, NormPath
from hf_qknorm.ops.trust.self_check import check
from hf_qknorm.ops.types import Heads, LayerCache, Options, Visible
from qknorm_tests import interpreter
from qknorm_tests.kernel_cases import shrink_tiles

interpreter.install()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16

RMS = NormPath("rms", 2.0, 1, None, BRAIN, False, False)
LAYER = NormPath("layer", 2.0, 2, 0, FULL, True, True)
ROTARY = (16, False, FULL)
PATHS = {
    "plain": CodePath("attention", FULL, 16, 1, True, ranges=True, sinks=True, window=True),
    "raw": CodePath("attention", BRAIN, 16, 2, True, 0, True, RMS, LAYER, ROTARY, cap="small", causal=True),
    "uncapped": CodePath("attention", HALF, 16, 1, False, 0, True, RMS, None, (8, True, HALF), causal=True),
    "dropout": CodePath("attention", FULL, 16, 1, True, cap="large", causal=True, dropout=True),
    "decode": CodePath("attention", BRAIN, 16, 4, False, 1, True, cap="small", causal=True),
    "statistics": CodePath("statistics", BRAIN, 16, 2, False, cap="small", causal=True, ranges=True),
    "norm_rope": CodePath("norm_rope", BRAIN, 16, 2, True, 0, True, RMS, LAYER, ROTARY),
    "norm_rope_one": CodePath("norm_rope_one", HALF, 16, 1, True, 0, True, LAYER, None, ROTARY),
    "step": CodePath("step", BRAIN, 16, 2, False, 1, True, RMS, LAYER, ROTARY, cap="small", ranges=True),
    "append": CodePath("append", BRAIN, 16, 2, False, 1, True, RMS, LAYER, ROTARY, cap="small", causal=True),
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(problems, "LENGTH", 21)
        monkeypatch.setattr(problems, "SHORT", 9)
        monkeypatch.setattr(problems, "LONGER", 2)
        monkeypatch.setattr(schedule, "gpu", lambda device: schedule.Gpu(4, 10**6))
        monkeypatch.setattr(problems, "KEYS", 300)


@pytest.mark.costly
@pytest.mark.parametrize("name", PATHS)
def test_sound_kernels_pass(name: str) -> None:
    found = check(PATHS[name], DEVICE)
    assert found.verdict.passed, found


@pytest.mark.costly
def test_blocks_are_shared_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    divide, shared = schedule.divide, []

    def noted(lines: schedule.Lines, *arguments: Any) -> Any:
        found = divide(lines, *arguments)
        shared.append((lines.since, found.parts > 1))
        return found

    monkeypatch.setattr(schedule, "divide", noted)
    monkeypatch.setattr(problems, "LONGER", 7)
    monkeypatch.setattr(schedule, "PARTIAL", 0.0)
    monkeypatch.setattr(schedule, "LAUNCH", 0.0)
    divide.cache_clear()
    shrink_tiles(monkeypatch, processors=16)
    assert check(PATHS["plain"]._replace(group=2, causal=True, window=False, ranges=False), DEVICE).verdict.passed
    divide.cache_clear()
    assert set(shared) == {(since, parts) for since in (False, True) for parts in (False, True)}


def scaled(owner: Any, name: str, part: str | int, factor: float) -> tuple[Any, str, Callable[..., Any]]:
    """A function of the kernels' host code whose result has a wrong part."""
    sound = getattr(owner, name)

    def broken(*arguments: Any, **options: Any) -> Any:
        found = sound(*arguments, **options)
        part_name = found._fields[part] if isinstance(part, int) and hasattr(found, "_fields") else part
        if isinstance(part_name, str):
            return found._replace(**{part_name: getattr(found, part_name) * factor})
        return tuple(x * factor if i == part else x for i, x in enumerate(found))

    return owner, name, broken


BROKEN = [
    ("raw", "gradient of k", lambda: scaled(attention, "backward", "k", 1.05)),
    ("raw", "gradient of gain of k", lambda: scaled(attention, "backward", "k_gain", 1.05)),
    ("plain", "gradient of sinks", lambda: scaled(attention, "backward", "sinks", 1.05)),
    ("plain", "output", lambda: scaled(attention, "forward", "out", float("nan"))),
    ("decode", "output", lambda: scaled(attention_decode, "forward", 0, 0.95)),
    ("statistics", "entropy", lambda: scaled(attention, "forward", "entropy", 1.05)),
    ("norm_rope", "keys", lambda: scaled(norm_rope, "forward", "k", 1.05)),
    ("norm_rope_one", "gradient of q", lambda: scaled(norm_rope, "backward", "q", 1.05)),
]


@pytest.mark.costly
@pytest.mark.parametrize(("path", "name", "breaks"), BROKEN)
def test_an_error_of_five_per_cent_is_found(
    path: str, name: str, breaks: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*breaks())
    found = check(PATHS[path], DEVICE)
    assert found.name == name
    assert not found.verdict.passed


@pytest.mark.parametrize("path", ["step", "append"])
def test_a_wrong_key_in_the_cache_is_found(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of many, which hardly shows in the output."""
    sound = library.fused_step

    def broken(heads: Heads, cache: LayerCache, visible: Visible, options: Options) -> Tensor:
        out = sound(heads, cache, visible, options)
        cache.keys[:, :, -1] *= 1.05
        return out

    monkeypatch.setattr(library, "fused_step", broken)
    found = check(PATHS[path], DEVICE)
    assert found.name == "keys"
    assert not found.verdict.passed


def test_a_wrong_rate_of_dropout_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward agree on the mask, and on the wrong factor."""
    monkeypatch.setattr(problems, "LENGTH", 60)
    sound = attention.dropout_numbers
    monkeypatch.setattr(attention, "dropout_numbers", lambda rate: sound(rate + 0.1))
    found = check(PATHS["dropout"]._replace(gradient=False), DEVICE)
    assert not found.verdict.passed


def test_the_callers_state_is_left_alone() -> None:
    def refuse(x: Any) -> Any:
        raise AssertionError("a tensor of the check was saved by the caller's hooks")

    torch.manual_seed(5)
    before = torch.get_rng_state()
    hooks = torch.autograd.graph.saved_tensors_hooks(refuse, refuse)
    with torch.inference_mode(), torch.autocast("cpu", BRAIN), hooks, FakeTensorMode():
        found = check(PATHS["norm_rope"], DEVICE)
        assert not torch.is_grad_enabled()
    assert found.verdict.passed
    assert torch.equal(torch.get_rng_state(), before)
