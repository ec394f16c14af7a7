"""A KneeSchedule in runs that are resumed: it keeps the length that it began with, and never moves backwards."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_qknorm import KneeSchedule, set_knee
from qknorm_tests.schedule_runs import CASES, LONGER, Runs, near
from qknorm_tests.short_runs import SaveAt, StopAt

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name


@pytest.fixture(autouse=True, scope="module")
def frozen() -> Iterator[None]:
    """Keeps what is loaded out of the collection of garbage that starts each run, three quarters of its time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=CASES)
def runs(request: Any, tmp_path: Path) -> Runs:
    return Runs(request.param, tmp_path)


@pytest.fixture
def knees(tmp_path: Path) -> Runs:
    return Runs("knee", tmp_path)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("stop", [3, 6])
def test_a_longer_run_keeps_the_length(runs, stop, loaded, caplog):
    runs.until(stop)
    seen = runs(runs.loaded(stop) if loaded else None, resume=stop, options=LONGER)
    assert seen == near(runs.way[stop:] + runs.way[-1:] * 4)
    assert "KneeSchedule continues with the length in the checkpoint: the " in caplog.text
    assert ("from step 4 on" if stop == 3 else "stays at") in caplog.text


def test_a_run_that_is_resumed_twice(runs):
    runs.until(2)
    assert runs(None, SaveAt(3), resume=2, options=LONGER) == near(runs.way[2:3])
    assert runs(None, SaveAt(6), resume=3, options={"max_steps": 6}) == near(runs.way[3:6])
    assert runs(resume=6, options={"max_steps": 20}) == near(runs.way[-1:] * 14)


def test_a_knee_begins_again(knees):
    knees.until(2)
    assert knees(None, SaveAt(8), resume=2, steps=2, target=0.5) == near([1.0, 0.625, 0.5, 0.5, 0.5, 0.5])
    assert knees(None, SaveAt(12), resume=8, options=LONGER) == near([0.5, 0.125, 0.0, 0.0])
    opened = knees(resume=12, options={"max_steps": 16}, target=math.inf, steps=2)
    assert (opened[0], opened[-1]) == (0.0, math.inf)


def test_two_schedules_are_refused(knees):
    with pytest.raises(ValueError, match="got 2 callbacks of type KneeSchedule, expected one"):
        knees(None, KneeSchedule())


def test_an_invalid_length_is_refused():
    with pytest.raises(ValueError, match=r"steps=0: expected the length of the schedule, at least 1, or None"):
        KneeSchedule(steps=0)


class EndByHand(TrainerCallback):
    def __init__(self, step: int, end: Callable[[Any], None]) -> None:
        self.step, self.end = step, end

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.end(kwargs["model"])


def test_a_knee_that_is_moved_by_hand_does_not_fall_back(knees):
    assert knees(None, EndByHand(1, lambda model: set_knee(model, 0.5)))[2:] == near([0.5, 0.25, 0, 0, 0, 0])
    assert knees(None, EndByHand(1, lambda model: set_knee(model, 0.0)), StopAt(3))[2:] == [0.0]
