"""Short runs of a Trainer with one schedule, resumed from checkpoints of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_qknorm import KneeSchedule
from hf_qknorm.model.knees import knee_of
from qknorm_tests.kneed import kneed
from qknorm_tests.short_runs import Record, SaveAt, trainer

LONGER = {"max_steps": 12}
Make = Callable[..., Any]


# The model, the arguments, and the knee before each step of a run of 8.
CASES: dict[str, tuple[Make, dict[str, Any], list[float]]] = {
    "knee": (kneed, {}, [4.0, 2.25, 1.0, 0.25, 0.0, 0.0, 0.0, 0.0]),
    "removal": (kneed, {"target": math.inf}, [4.0, 4.858, 9.0, 33.14, math.inf, math.inf, math.inf, math.inf]),
}


class Runs:
    """Runs of one case in one folder."""

    def __init__(self, case: str, folder: Path) -> None:
        self.make, self.arguments, self.way = CASES[case]
        self.folder = folder

    def __call__(
        self, model: Any = None, *others: TrainerCallback, resume: int = 0, options: Any = None, **arguments: Any
    ) -> list[float]:
        """The knee before each step of a run, or of one that is resumed from the checkpoint of step `resume`."""
        record, schedule = Record(knee_of), KneeSchedule(**{**self.arguments, **arguments})
        run = trainer(model or self.make(), self.folder, schedule, record, *others, **(options or {}))
        run.train(resume_from_checkpoint=str(self.checkpoint(resume)) if resume else None)
        return record.seen

    def until(self, step: int, **options: Any) -> None:
        """A run of 8 steps that ends early."""
        assert self(None, SaveAt(step), options=options) == near(self.way[:step])

    def checkpoint(self, step: int) -> Path:
        return self.folder / f"checkpoint-{step}"

    def loaded(self, step: int) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.checkpoint(step))


def near(numbers: list[float]) -> Any:
    return pytest.approx(numbers, rel=0.1)  # norms hold a rounded knee
