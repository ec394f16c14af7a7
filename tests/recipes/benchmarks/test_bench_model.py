"""A patched 1B Llama against its eager attention in fp64; a tiny one where kernels are interpreted."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which comes with torch on CUDA and with the test extra")
from qknorm_tests import interpreter

bench_model = import_module("bench_model")
interpreter.install()
NATIVE = torch.cuda.is_available()
DEVICE = torch.device("cuda" if NATIVE else "cpu")
SIZE = bench_model.Size(batch=1, length=512)
if not NATIVE:
    SIZE = bench_model.TINY


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_and_gradients_keep_the_budget(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_model, "BACKEND", "hf_qknorm_triton")
    verdicts = bench_model.check(SIZE, DEVICE, dtype)
    assert verdicts.keys() == {"logits", "q_norm", "k_proj"}
    assert all(verdict.passed for verdict in verdicts.values()), verdicts


@pytest.mark.slow
@pytest.mark.skipif(NATIVE, reason="takes a minute on a GPU")
def test_the_losses_fall_for_each_model() -> None:
    for step in bench_model.PLAIN:
        found = bench_model.losses(step, SIZE, DEVICE, 20)
        assert len(found) == 20
        assert sum(found[-5:]) < sum(found[:5])


@pytest.mark.skipif(NATIVE, reason="takes a minute on a GPU")
def test_the_page_has_every_way_to_train(tmp_path) -> None:
    assert bench_model.main(["--output", str(tmp_path / "step.md")]) == 0
    lines = [line for line in (tmp_path / "step.md").read_text().splitlines() if line.endswith("|")][2:]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == [step.name for step in bench_model.STEPS]
    assert lines[0].endswith("| 1.00 |")
