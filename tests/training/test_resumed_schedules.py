"""Schedules in runs that are resumed: they keep the length that they began with, and never move backwards."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_qknorm import BlendSchedule, CapSchedule, KneeSchedule, patch_model, set_blend, set_cap, set_knee
from qknorm_tests.kneed import wrapped
from qknorm_tests.schedule_runs import CASES, LONGER, Runs, monotonic, near
from qknorm_tests.short_runs import SaveAt, StopAt
from qknorm_tests.tiny import tiny_model

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
def blends(tmp_path: Path) -> Runs:
    return Runs("blend", tmp_path)


@pytest.fixture
def knees(tmp_path: Path) -> Runs:
    return Runs("knee", tmp_path)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("stop", [3, 6])
def test_a_longer_run_keeps_the_length(runs, stop, loaded, caplog):
    runs.until(stop)
    seen = runs(runs.loaded(stop) if loaded else None, resume=stop, options=LONGER)
    assert seen == near(runs.way[stop:] + runs.way[-1:] * 4)
    assert f"{runs.name} continues with the length in the checkpoint: the " in caplog.text
    assert ("from step 4 on" if stop == 3 else "stays at") in caplog.text


def test_a_run_that_is_resumed_twice(runs):
    runs.until(2)
    assert runs(None, SaveAt(3), resume=2, options=LONGER) == near(runs.way[2:3])
    assert runs(None, SaveAt(6), resume=3, options={"max_steps": 6}) == near(runs.way[3:6])
    assert runs(resume=6, options={"max_steps": 20}) == near(runs.way[-1:] * 14)


@pytest.mark.parametrize(
    ("arguments", "way"),
    [({"steps": 4}, [0.5, 0.625, 0.75, 0.875, 1.0]), ({"share": 0.2}, [0.5, 0.75, 1.0, 1.0, 1.0])],
)
def test_other_arguments_begin_again_at_the_present_number(blends, arguments, way, caplog):
    blends.until(2)
    assert blends(None, SaveAt(4), resume=2, options=LONGER, **arguments) == near(way[:2])
    assert "BlendSchedule begins again at step 2 (" in caplog.text
    caplog.clear()
    assert blends(None, SaveAt(7), resume=4, options=LONGER, **arguments) == near(way[2:])
    assert "begins again" not in caplog.text


def test_a_knee_begins_again(knees):
    knees.until(2)
    assert knees(None, SaveAt(8), resume=2, steps=2, target=0.5) == near([1.0, 0.625, 0.5, 0.5, 0.5, 0.5])
    assert knees(None, SaveAt(12), resume=8, options=LONGER) == [0.5, 0.125, 0.0, 0.0]
    with pytest.raises(ValueError, match="this model has no knee to change"):
        knees(resume=12, options={"max_steps": 16}, target=math.inf)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("stop", [3, 6])
def test_older_checkpoints(runs, stop, loaded, caplog):
    runs.until(stop)
    runs.as_older_version(stop)
    model = partial(runs.loaded, stop) if loaded else runs.make
    if runs.name == "CapSchedule" and stop == 3 and not loaded:
        with pytest.raises(ValueError, match=r"call set_cap\(model, b\) with the cap's blend b of the checkpoint"):
            runs(resume=stop)
        model = lambda: set_cap(made := runs.make(), 0.75) or made  # noqa: E731
    unchanged, seen = (runs(model(), resume=stop, options=options) for options in ({}, LONGER))
    assert unchanged == near(runs.way[stop:])
    assert seen[:2] == near(runs.way[stop : stop + 1] * 2)  # until this run's own way has come that far
    assert monotonic(runs, seen)
    assert seen[-1] == runs.way[-1]
    assert f"{runs.name} finds no length in the checkpoint and takes this run's: the " in caplog.text


def test_two_schedules_of_one_number_are_refused(blends):
    with pytest.raises(ValueError, match="got 2 callbacks of type BlendSchedule, expected one"):
        blends(None, BlendSchedule())
    with pytest.raises(ValueError, match="this model is in a blend, which moves the cap as well"):
        blends(None, CapSchedule())


@pytest.mark.parametrize("schedule", [BlendSchedule, CapSchedule, KneeSchedule])
def test_an_invalid_length_is_refused(schedule):
    with pytest.raises(ValueError, match=r"steps=0: expected the length of the schedule, at least 1, or None"):
        schedule(steps=0)


def test_an_older_adapter(blends):
    blends.make = lambda: wrapped(patch_model(tiny_model("llama"), "qk_norm"))
    blends.until(3)
    blends.as_older_version(3)
    with pytest.raises(ValueError, match="no state of a BlendSchedule, and neither its weights nor the model tell"):
        blends(resume=3)
    set_blend(model := blends.make(), 0.75)
    assert blends(model, resume=3) == near(blends.way[3:])


class EndByHand(TrainerCallback):
    def __init__(self, step: int, end: Callable[[Any], None]) -> None:
        self.step, self.end = step, end

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.end(kwargs["model"])


def test_a_number_that_is_moved_by_hand_does_not_fall_back(blends, knees):
    assert blends(None, EndByHand(2, lambda model: set_blend(model, 1.0))) == near([0, 0.25, 0.5] + [1.0] * 5)
    assert knees(None, EndByHand(1, lambda model: set_knee(model, 0.5)))[2:] == near([0.5, 0.25, 0, 0, 0, 0])
    assert knees(None, EndByHand(1, lambda model: set_knee(model, 0.0)), StopAt(3))[2:] == [0.0]
