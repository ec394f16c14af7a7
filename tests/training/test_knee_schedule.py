"""Runs with a KneeSchedule: its path, resumed runs, checkpoints, and refused runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, TrainerCallback

from hf_qknorm import KneeSchedule, remove_norms, set_knee
from hf_qknorm.model.knees import NO_NORM, knee_of
from qknorm_tests.kneed import kneed, logits, plain, wrapped
from qknorm_tests.short_runs import Record, SaveAt, StopAt, assert_equal_weights, trainer
from qknorm_tests.tables import make_batch

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name

# The arguments, and the knee before each step of a run of 8 that begins with 4.
PATHS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "lowered": ({}, [4.0, 2.25, 1.0, 0.25, 0.0, 0.0, 0.0, 0.0]),
    "opened": ({"target": math.inf}, [4.0, 4.858, 9.0, 33.14, math.inf, math.inf, math.inf, math.inf]),
    "opened at the end": ({"share": 0.5, "target": math.inf, "after": 0.5}, [4.0] * 5 + [4.858, 9.0, 33.14]),
}


class Runs:
    """Runs of a Trainer in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self, model: Any, *callbacks: TrainerCallback, resume: int = 0, last: int = 8, **arguments: Any
    ) -> list[float]:
        """The knee before each step of a run, or of one that is resumed from the checkpoint of step `resume`."""
        record = Record(knee_of)
        run = trainer(model, self.folder, KneeSchedule(**arguments), record, *callbacks, max_steps=last)
        run.train(resume_from_checkpoint=str(self.checkpoint(resume)) if resume else None)
        return record.seen

    def checkpoint(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step}"


def near(numbers: list[float]) -> Any:
    return pytest.approx(numbers, rel=0.1)  # norms hold a rounded knee


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.mark.parametrize(("path", "stop"), [("lowered", 3), ("opened", 2), ("opened at the end", 6)])
def test_a_resumed_run_equals_an_uninterrupted_one(path, stop, runs):
    """From the initial model, and from the one in the checkpoint."""
    (arguments, way), whole = PATHS[path], kneed()
    seen = runs(whole, **arguments)
    assert seen == near(way)
    assert knee_of(whole) == (math.inf if arguments else 0)
    runs(kneed(), SaveAt(stop), **arguments)
    loaded = AutoModelForCausalLM.from_pretrained(runs.checkpoint(stop))
    assert knee_of(loaded) == seen[stop]
    for resumed in (kneed(), loaded):
        assert runs(resumed, resume=stop, **arguments) == seen[stop:]
        assert list(resumed.state_dict()) == list(whole.state_dict())
        assert_equal_weights(resumed, whole)


@pytest.mark.parametrize(("path", "stop", "words"), [("lowered", 3, "from step 4 on"), ("opened", 6, "stays at ∞")])
def test_a_longer_run_keeps_the_length(path, stop, words, runs, caplog):
    arguments, way = PATHS[path]
    runs(kneed(), SaveAt(stop), **arguments)
    assert runs(kneed(), SaveAt(7), resume=stop, last=12, **arguments) == near(way[stop:7])
    assert "KneeSchedule continues with the length in the checkpoint: the " in caplog.text
    assert words in caplog.text
    assert runs(kneed(), resume=7, last=12, **arguments) == near(way[-1:] * 5)


def test_with_other_arguments_a_path_begins_again(runs):
    runs(kneed(), SaveAt(2))
    assert runs(kneed(), SaveAt(8), resume=2, steps=2, target=0.5) == near([1.0, 0.625, 0.5, 0.5, 0.5, 0.5])
    assert runs(kneed(), resume=8, last=12) == near([0.5, 0.125, 0.0, 0.0])


@pytest.mark.parametrize(("share", "after"), [(0.25, 0.75), (0.3, 0.7), (0.01, 0.99), (1.0, 0.0), (1 / 3, 2 / 3)])
def test_a_path_to_the_end_of_a_run_ends_with_it(share, after):
    """For a run of any length, at its last step and not before."""
    schedule = KneeSchedule(share, math.inf, after=after)
    ends = [[schedule.at(step, steps, 4.0) == NO_NORM for step in (steps - 1, steps)] for steps in range(1, 2001)]
    assert ends == [[False, True]] * 2000


@pytest.mark.parametrize("steps", [1, 7])
def test_norms_come_off_at_the_end_of_a_run_of_any_length(steps, runs):
    model = kneed()
    runs(model, last=steps, share=0.25, target=math.inf, after=0.75)
    assert knee_of(model) == math.inf
    assert type(remove_norms(model)) is LlamaForCausalLM


@pytest.mark.parametrize("retry", [False, True], ids=["second run", "out of memory"])
def test_a_path_that_has_ended_stays_at_its_target(retry, tmp_path, monkeypatch):
    """In a second `train()`, and where transformers begins a run again with a smaller batch."""
    model = kneed()
    made = trainer(model, tmp_path, KneeSchedule(share=0.5), max_steps=4, auto_find_batch_size=retry)
    steps = iter([None] * 3 + [RuntimeError("CUDA out of memory.")] * retry)
    step = made.training_step

    def training_step(*args: Any, **options: Any) -> Any:
        if error := next(steps, None):
            raise error
        return step(*args, **options)

    monkeypatch.setattr(made, "training_step", training_step)
    made.train()
    if not retry:
        made.train()
    assert made.state.global_step == 4
    assert knee_of(model) == 0


class MoveAt(TrainerCallback):
    """Moves the knee by hand."""

    def __init__(self, step: int, knee: float) -> None:
        self.step, self.knee = step, knee

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            set_knee(kwargs["model"], self.knee)


def test_a_knee_that_is_moved_by_hand_does_not_fall_back(runs):
    assert runs(kneed(), MoveAt(1, 0.5))[2:] == near([0.5, 0.25, 0, 0, 0, 0])
    assert runs(kneed(), MoveAt(1, 0.0), StopAt(3))[2:] == [0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"share": 0}, "share=0 of the run: expected more than 0"),
        ({"after": -0.1}, "after=-0.1 of the run: expected .* with share=0.5 at most 1"),
        ({"after": 0.75}, "after=0.75 of the run: expected .* with share=0.5 at most 1"),
        ({"target": math.nan}, "target=nan: expected a knee"),
        ({"steps": 0}, "steps=0: expected the length of the schedule, at least 1, or None"),
    ],
)
def test_refused_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        KneeSchedule(**arguments)


def at_infinity() -> Any:
    model = kneed()
    set_knee(model, math.inf)
    return model


@pytest.mark.parametrize(
    ("make", "arguments", "others", "message"),
    [
        (plain, {}, [], "the norms hold no mean length"),
        (at_infinity, {"target": math.inf}, [], "the model's knee is ∞, which is KneeSchedule's target: calibrate"),
        (kneed, {}, [KneeSchedule()], "got 2 callbacks of type KneeSchedule, expected one"),
    ],
)
def test_runs_that_are_refused_at_their_beginning(
    make: Callable[[], Any], arguments: Any, others: Any, message: str, runs: Runs
) -> None:
    with pytest.raises(ValueError, match=message):
        runs(make(), *others, **arguments)


def test_a_checkpoint_without_the_schedules_state_is_refused(runs):
    trainer(kneed(), runs.folder, SaveAt(2)).train()
    with pytest.raises(ValueError, match="the checkpoint holds no state of one KneeSchedule"):
        runs(kneed(), resume=2)


def test_an_adapter_saves_the_knee_of_its_run(tmp_path):
    """Its file has the copies of the norms, and their knees; the base's own move too, and stay in memory."""
    adapted = wrapped(kneed())
    trainer(adapted, tmp_path, KneeSchedule(share=1.0), max_steps=2, save_strategy="steps", save_steps=1).train()
    assert knee_of(adapted) == 0
    half, end = (peft.PeftModel.from_pretrained(kneed(), tmp_path / f"checkpoint-{step}").eval() for step in (1, 2))
    assert knee_of(half) == pytest.approx(1.0, rel=0.1)
    assert torch.equal(logits(end), logits(adapted.eval()))


def test_the_best_checkpoint_brings_its_knee(tmp_path):
    """The run ends at a knee of 0; its best step is the first."""
    model, rows = kneed(), [{"input_ids": row, "labels": row} for row in make_batch("none", labels=False)["input_ids"]]
    made = trainer(
        model, tmp_path, KneeSchedule(share=1.0), max_steps=3, eval_strategy="steps", eval_steps=1, learning_rate=0.1,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_loss",
        greater_is_better=False,
    )  # fmt: skip
    made.eval_dataset = rows
    made.train()
    best = AutoModelForCausalLM.from_pretrained(made.state.best_model_checkpoint)
    assert knee_of(model) == knee_of(best) > 0
    assert_equal_weights(model, best)
