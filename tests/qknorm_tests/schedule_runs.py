"""Short runs of a Trainer with one schedule, resumed from checkpoints of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_qknorm import BlendSchedule, CapSchedule, KneeSchedule, patch_model, start_removal
from hf_qknorm.model.knees import NO_NORM, knee_of
from hf_qknorm.training.removal import START
from hf_qknorm.training.schedule import Schedule
from qknorm_tests.kneed import kneed, qwen3
from qknorm_tests.short_runs import Record, SaveAt, trainer
from qknorm_tests.tables import blend_of, make_batch
from qknorm_tests.tiny import tiny_model

LONGER = {"max_steps": 12}
Make = Callable[..., Any]


def cap_of(model: Any) -> float:
    return model.config.scheme.softcap or math.inf


# The schedule, its model, the number that it moves, and that number before each step of a run of 8.
CASES: dict[str, tuple[type[Schedule], Make, Callable[[nn.Module], float], dict[str, Any], list[float]]] = {
    "blend": (
        BlendSchedule,
        lambda: patch_model(tiny_model("llama"), "qk_norm_cap"),
        blend_of,
        {},
        [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0],
    ),
    "cap": (
        CapSchedule,
        lambda: patch_model(tiny_model("llama"), "soft_cap"),
        cap_of,
        {},
        [math.inf, 200.0, 100.0, 50 / 0.75, 50.0, 50.0, 50.0, 50.0],
    ),
    "knee": (KneeSchedule, kneed, knee_of, {}, [4.0, 2.25, 1.0, 0.25, 0.0, 0.0, 0.0, 0.0]),
    "removal": (
        KneeSchedule,
        lambda: start_removal(qwen3(), [make_batch("none", labels=False)]),
        knee_of,
        {"target": math.inf},
        [START, 0.1716, 1.0, 5.828, NO_NORM, NO_NORM, NO_NORM, NO_NORM],
    ),
}


class Runs:
    """Runs of one case in one folder."""

    def __init__(self, case: str, folder: Path) -> None:
        self.schedule, self.make, self.number, self.arguments, self.way = CASES[case]
        self.folder, self.name = folder, self.schedule.__name__

    def __call__(
        self, model: Any = None, *others: TrainerCallback, resume: int = 0, options: Any = None, **arguments: Any
    ) -> list[float]:
        """The number before each step of a run, or of one that is resumed from the checkpoint of step `resume`."""
        record, schedule = Record(self.number), self.schedule(**{**self.arguments, **arguments})
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

    def as_older_version(self, step: int) -> None:
        """Give a checkpoint the state that older versions wrote: none for a blend, no length for a knee."""
        file = self.checkpoint(step) / "trainer_state.json"
        state = json.loads(file.read_text())
        entry = state["stateful_callbacks"].pop(self.name)
        if self.schedule is KneeSchedule:
            del entry["args"]["steps"]
            entry["attributes"] = {"start": entry["attributes"]["start"], "knee": entry["attributes"]["value"]}
            state["stateful_callbacks"][self.name] = entry
        file.write_text(json.dumps(state))


def near(numbers: list[float]) -> Any:
    return pytest.approx(numbers, rel=1e-3)


def monotonic(runs: Runs, seen: list[float]) -> bool:
    return seen == sorted(seen, reverse=runs.way[0] > runs.way[-1])
