"""Runs with a KneeSchedule: resumed runs, checkpoints, and refused runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, Trainer, TrainerCallback

from hf_qknorm import KneeSchedule, remove_norms, set_knee
from hf_qknorm.model.knees import NO_NORM, knee_of
from qknorm_tests.kneed import kneed, logits, plain, wrapped
from qknorm_tests.short_runs import Record, StopAt, assert_equal_weights, trainer
from qknorm_tests.tables import make_batch

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name


def run(model: PreTrainedModel, folder: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    return trainer(model, folder, *callbacks, save_strategy="steps", save_steps=1, **options)


LOWERED = ({}, [4.0, 2.25, 1.0, 0.25, 0.0, 0.0, 0.0, 0.0])
OPENED = ({"share": 0.5, "target": math.inf, "after": 0.5}, [4.0] * 5 + [4.8579, 9.0, 33.1421])  # 10/(1 + cos πu) − 1


@pytest.mark.parametrize(("options", "way", "stop"), [(*LOWERED, 3), (*OPENED, 6)], ids=["lowered", "opened"])
def test_a_resumed_run_equals_an_uninterrupted_one(options, way, stop, tmp_path):
    whole, record = kneed(), Record(knee_of)
    run(whole, tmp_path / "whole", KneeSchedule(**options), record).train()
    assert record.seen == pytest.approx(way, rel=0.1)
    assert knee_of(whole) == (math.inf if options else 0)
    run(kneed(), tmp_path / "parts", KneeSchedule(**options), StopAt(stop)).train()
    checkpoint = tmp_path / "parts" / f"checkpoint-{stop}"
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert knee_of(loaded) == record.seen[stop]
    for resumed in (kneed(), loaded):  # the initial model, and the one in the checkpoint
        again = Record(knee_of)
        run(resumed, tmp_path / "parts", KneeSchedule(**options), again).train(resume_from_checkpoint=str(checkpoint))
        assert again.seen == record.seen[stop:]
        assert resumed.config.scheme == whole.config.scheme
        assert list(resumed.state_dict()) == list(whole.state_dict())
        assert_equal_weights(resumed, whole)


@pytest.mark.parametrize(("share", "after"), [(0.25, 0.75), (0.3, 0.7), (0.01, 0.99), (1.0, 0.0), (1 / 3, 2 / 3)])
def test_a_path_to_the_end_of_a_run_ends_with_it(share, after):
    """For a run of any length, at its last step and not before."""
    schedule = KneeSchedule(share, math.inf, after=after)
    ends = [[schedule.at(step, steps, 4.0) == NO_NORM for step in (steps - 1, steps)] for steps in range(1, 2001)]
    assert ends == [[False, True]] * 2000


@pytest.mark.parametrize("steps", [1, 7])
def test_norms_come_off_at_the_end_of_a_run_of_any_length(steps, tmp_path):
    model = kneed()
    trainer(model, tmp_path, KneeSchedule(0.25, math.inf, after=0.75), max_steps=steps).train()
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


def test_refused_settings():
    with pytest.raises(ValueError, match=r"share=0 of the run: expected more than 0"):
        KneeSchedule(share=0)
    for after, share in ((-0.1, 0.5), (1.0, 0.5), (0.75, 0.5)):
        with pytest.raises(ValueError, match=f"after={after} of the run: expected .* with share={share} at most 1"):
            KneeSchedule(share=share, after=after)
    for target in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"target={target}: expected a knee"):
            KneeSchedule(target=target)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (plain, {}, "the norms hold no mean length"),
        (kneed, {"target": math.inf}, "the model's knee is ∞, which is KneeSchedule's target: calibrate"),
    ],
)
def test_runs_that_are_refused_at_their_beginning(make, options, message, tmp_path):
    model = make()
    if options:
        set_knee(model, math.inf)
    with pytest.raises(ValueError, match=message):
        run(model, tmp_path, KneeSchedule(**options)).train()


def test_a_checkpoint_without_the_schedules_state_is_refused(tmp_path):
    run(kneed(), tmp_path / "without", max_steps=2).train()
    with pytest.raises(ValueError, match="the checkpoint holds no state of one KneeSchedule"):
        run(kneed(), tmp_path / "again", KneeSchedule()).train(
            resume_from_checkpoint=str(tmp_path / "without" / "checkpoint-2")
        )


def test_an_adapter_saves_the_knee_of_its_run(tmp_path):
    """Its file has the copies of the norms, and their knees; the base's own move too, and stay in memory."""
    adapted = wrapped(kneed())
    run(adapted, tmp_path, KneeSchedule(share=1.0), max_steps=2).train()
    assert knee_of(adapted) == 0
    half, end = (peft.PeftModel.from_pretrained(kneed(), tmp_path / f"checkpoint-{step}").eval() for step in (1, 2))
    assert knee_of(half) == pytest.approx(1.0, rel=0.1)
    assert torch.equal(logits(end), logits(adapted.eval()))


def test_the_best_checkpoint_brings_its_knee(tmp_path):
    """The run ends at a knee of 0; its best step is the first."""
    model, rows = kneed(), [{"input_ids": row, "labels": row} for row in make_batch("none", labels=False)["input_ids"]]
    made = run(
        model, tmp_path, KneeSchedule(share=1.0), max_steps=3, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False, learning_rate=0.1,
    )  # fmt: skip
    made.eval_dataset = rows
    made.train()
    best = AutoModelForCausalLM.from_pretrained(made.state.best_model_checkpoint)
    assert knee_of(model) == knee_of(best) > 0
    assert_equal_weights(model, best)
