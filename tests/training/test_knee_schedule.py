"""Runs with a KneeSchedule: its path, resumed runs, checkpoints, and refused runs."""

import logging
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_qknorm import KneeSchedule
from hf_qknorm.model.knees import NO_NORM, knee_of
from qknorm_tests.kneed import kneed, logits, plain, wrapped
from qknorm_tests.short_runs import Record, SaveAt, trainer
from qknorm_tests.tables import assert_identical

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name

# The arguments, and the knee before each step of a run of 8 that begins with 4.
PATHS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "lowered": ({}, [4.0, 2.25, 1.0, 0.25, 0.0, 0.0, 0.0, 0.0]),
    "opened": ({"target": math.inf}, [4.0, 4.858, 9.0, 33.14, math.inf, math.inf, math.inf, math.inf]),
    "opened at the end": ({"share": 0.5, "target": math.inf, "after": 0.5}, [4.0] * 5 + [4.858, 9.0, 33.14]),
}


@pytest.fixture
def runs(tmp_path: Path) -> Any:
    """Runs a Trainer in one folder, from the beginning or from the checkpoint of the step `resume`.

    Returns the knee before each step.
    """

    def run(model: Any, *callbacks: TrainerCallback, resume: int = 0, last: int = 8, **arguments: Any) -> list[float]:
        record = Record(knee_of)
        made = trainer(model, tmp_path, KneeSchedule(**arguments), record, *callbacks, max_steps=last)
        made.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{resume}") if resume else None)
        return record.seen

    return run


def near(numbers: list[float]) -> Any:
    return pytest.approx(numbers, rel=0.1)  # norms hold a rounded knee


@pytest.mark.parametrize(
    ("path", "stop"), [("lowered", 3), pytest.param("opened", 2, marks=pytest.mark.slow), ("opened at the end", 6)]
)
def test_a_resumed_run_equals_an_uninterrupted_one(path, stop, runs, tmp_path):
    """From the initial model, and from the one in the checkpoint."""
    (arguments, way), whole = PATHS[path], kneed()
    seen = runs(whole, **arguments)
    assert seen == near(way)
    assert knee_of(whole) == (math.inf if arguments else 0)
    runs(kneed(), SaveAt(stop), **arguments)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{stop}")
    assert knee_of(loaded) == seen[stop]
    for resumed in (kneed(), loaded):
        assert runs(resumed, resume=stop, **arguments) == seen[stop:]
        assert list(resumed.state_dict()) == list(whole.state_dict())
        assert_identical(resumed.state_dict(), whole.state_dict())


@pytest.mark.parametrize(("path", "stop"), [("lowered", 3), ("opened", 6)])
def test_a_longer_or_shorter_run_keeps_the_path(path, stop, runs, caplog):
    (arguments, way), target = PATHS[path], "∞" if path == "opened" else "0"
    runs(kneed(), SaveAt(stop), **arguments)
    with caplog.at_level(logging.INFO, "hf_qknorm"):
        assert runs(kneed(), SaveAt(7), resume=stop, last=12, **arguments) == near(way[stop:7])
    assert f"now and {target} from step 4 on" in caplog.text
    assert runs(kneed(), resume=7, last=12, **arguments) == near(way[-1:] * 5)


def test_a_path_that_the_run_does_not_finish_is_warned_of(runs, caplog):
    runs(kneed(), SaveAt(1), share=1.0)
    assert runs(kneed(), resume=1, last=3, share=1.0) == near([3.063, 2.25])
    assert "now and 0 from step 8 on, after this run's last step, 3" in caplog.text


@pytest.mark.parametrize(("share", "after"), [(0.25, 0.75), (0.3, 0.7), (0.01, 0.99), (1.0, 0.0), (1 / 3, 2 / 3)])
def test_a_path_to_the_end_of_a_run_ends_with_it(share, after):
    """For a run of any length, at its last step and not before."""
    schedule = KneeSchedule(share, math.inf, after=after)
    ends = [[schedule.at(step, steps, 4.0) == NO_NORM for step in (steps - 1, steps)] for steps in range(1, 2001)]
    assert ends == [[False, True]] * 2000


def test_a_path_that_has_ended_stays_at_its_target_in_a_second_run(tmp_path):
    model = kneed()
    made = trainer(model, tmp_path, KneeSchedule(share=0.5), max_steps=4)
    for _ in range(2):
        made.train()
        assert knee_of(model) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"share": 0}, "share=0 of the run: expected more than 0"),
        ({"after": -0.1}, "after=-0.1 of the run: expected .* with share=0.5 at most 1"),
        ({"after": 0.75}, "after=0.75 of the run: expected .* with share=0.5 at most 1"),
        ({"target": math.nan}, "target=nan: expected a knee"),
    ],
)
def test_refused_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        KneeSchedule(**arguments)


def test_runs_that_are_refused_at_their_beginning(runs, tmp_path):
    with pytest.raises(ValueError, match="the norms hold no mean length"):
        runs(plain())
    with pytest.raises(ValueError, match="got 2 callbacks of type KneeSchedule, expected one"):
        runs(kneed(), KneeSchedule())
    runs(kneed(), SaveAt(2))
    with pytest.raises(ValueError, match=r"had a KneeSchedule with .*'share': 0.5.* has .*'share': 0.25.* resume"):
        runs(kneed(), resume=2, share=0.25)
    trainer(kneed(), tmp_path, SaveAt(3)).train()
    with pytest.raises(ValueError, match="had no KneeSchedule, and this one has"):
        runs(kneed(), resume=3)


def test_an_adapter_saves_the_knee_of_its_run(tmp_path):
    """Its file has the copies of the norms, and their knees; the base's own move too, and stay in memory."""
    adapted = wrapped(kneed())
    trainer(adapted, tmp_path, KneeSchedule(share=1.0), max_steps=2, save_strategy="steps", save_steps=1).train()
    assert knee_of(adapted) == 0
    half, end = (peft.PeftModel.from_pretrained(kneed(), tmp_path / f"checkpoint-{step}").eval() for step in (1, 2))
    assert knee_of(half) == pytest.approx(1.0, rel=0.1)
    assert torch.equal(logits(end), logits(adapted.eval()))
