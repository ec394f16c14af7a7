"""Runs with a KneeSchedule: resumed runs, checkpoints, and refused runs."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback

from hf_qknorm import KneeSchedule
from hf_qknorm.model.knees import NO_NORM, knee_of
from qknorm_tests.kneed import kneed, plain, without_gain, wrapped
from qknorm_tests.short_runs import Record, StopAt, assert_equal_weights, trainer

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft uses the old name


def run(model: PreTrainedModel, folder: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    return trainer(model, folder, *callbacks, save_strategy="steps", save_steps=1, **options)


LOWERED = ({}, [4.0, 2.25, 1.0, 0.25, 0.0, 0.0, 0.0, 0.0])
OPENED = ({"share": 0.5, "target": math.inf, "after": 0.5}, [4.0] * 5 + [4.8579, 9.0, 33.1421])  # 10/(1 + cos πu) − 1


@pytest.mark.parametrize(("options", "way", "stop"), [(*LOWERED, 3), (*OPENED, 6)], ids=["lowered", "opened"])
def test_a_resumed_run_equals_an_uninterrupted_one(options, way, stop, tmp_path):
    whole, record = kneed(), Record(knee_of)
    run(whole, tmp_path / "whole", KneeSchedule(**options), record).train()
    assert record.seen == pytest.approx(way, rel=1e-4)
    assert whole.config.scheme.knee == (NO_NORM if options else 0)
    run(kneed(), tmp_path / "parts", KneeSchedule(**options), StopAt(stop)).train()
    checkpoint = tmp_path / "parts" / f"checkpoint-{stop}"
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert loaded.config.scheme.knee == record.seen[stop]
    for resumed in (kneed(), loaded):  # the initial model, and the one in the checkpoint
        again = Record(knee_of)
        run(resumed, tmp_path / "parts", KneeSchedule(**options), again).train(resume_from_checkpoint=str(checkpoint))
        assert again.seen == record.seen[stop:]
        assert resumed.config.scheme == whole.config.scheme
        assert list(resumed.state_dict()) == list(whole.state_dict())
        assert_equal_weights(resumed, whole)


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
    ("make", "best", "message"),
    [
        (plain, False, "the model's knee is 0, which is KneeSchedule's target: calibrate"),
        (without_gain, False, 'gain="none"'),
        (lambda: wrapped(kneed()), False, "an adapter's checkpoint does not hold the knee"),
        (kneed, True, "load_best_model_at_end loads weights for another knee"),
    ],
)
def test_runs_that_are_refused_at_their_beginning(make, best, message, tmp_path):
    made = run(make(), tmp_path, KneeSchedule())
    made.args.load_best_model_at_end = best
    with pytest.raises(ValueError, match=message):
        made.train()


def test_a_checkpoint_without_the_schedules_state_is_refused(tmp_path):
    run(kneed(), tmp_path / "without", max_steps=2).train()
    with pytest.raises(ValueError, match="the checkpoint holds no state of one KneeSchedule"):
        run(kneed(), tmp_path / "again", KneeSchedule()).train(
            resume_from_checkpoint=str(tmp_path / "without" / "checkpoint-2")
        )
    run(kneed(), tmp_path / "with", KneeSchedule(), StopAt(2)).train()
    with pytest.raises(RuntimeError, match="eps is in the weights, and the norm has no knee"):
        run(plain(), tmp_path / "again", KneeSchedule()).train(
            resume_from_checkpoint=str(tmp_path / "with" / "checkpoint-2")
        )


def test_deepspeed_is_refused():
    arguments: Any = SimpleNamespace(deepspeed_plugin=object(), load_best_model_at_end=False)
    with pytest.raises(ValueError, match="DeepSpeed steps copies of the weights in fp32.* use DDP or FSDP 2"):
        KneeSchedule().on_train_begin(arguments, SimpleNamespace(global_step=0), None, model=kneed())  # type: ignore[arg-type]
