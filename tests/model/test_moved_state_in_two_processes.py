"""Ranks that start from different calibrations, and KneeSchedule under DeepSpeed's ZeRO.

Under FSDP: `tests/training/test_sharded.py`.
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_qknorm.model.knees import knee_of
from qknorm_tests.kneed import kneed, logits
from qknorm_tests.pair import of_task, run_once, run_pairs

pytestmark = pytest.mark.slow

deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
SCHEDULED = [pytest.param("zero2", marks=deepspeed), pytest.param("zero3", marks=deepspeed)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a task."""

    def folder(task: str) -> Path:
        root = run_once(tmp_path_factory, f"moved-{task}", lambda folder: run_pairs("moved_run", folder, [task]))
        return of_task(root, task) / task

    return folder


def test_the_second_rank_has_the_knees_of_the_first(ran: Callable[[str], Path]) -> None:
    found = load_file(ran("ddp") / "logits.safetensors")["logits"]
    torch.testing.assert_close(
        found, logits(kneed("lp")), rtol=1e-6, atol=1e-6
    )  # shards may be summed in another order


@pytest.mark.parametrize("task", SCHEDULED)
def test_a_schedule_trains_saves_and_resumes(task: str, ran: Callable[[str], Path]) -> None:
    folder = ran(task)
    for rank in range(2):
        assert json.loads((folder / f"knees {rank}.json").read_text()) == pytest.approx([1.0] * 3, rel=0.1)
    saved, whole, resumed = (
        AutoModelForCausalLM.from_pretrained(folder / name) for name in ("parts/checkpoint-2", "whole/end", "parts/end")
    )
    assert 1.1 < knee_of(saved) < 3.9
    assert knee_of(whole) == knee_of(resumed) == pytest.approx(1.0, rel=0.1)
    torch.testing.assert_close(logits(resumed), logits(whole), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(whole), logits(saved), atol=1e-2)
