"""Move a model's knee while it trains, in small steps: down to the plain scheme, or up to a model without norms.

Upwards, with t = knee/(1 + knee), the norm divides x by √((1 − t)·mean x² + t·P), up to ε: at t = 1 by a constant. This
is a norm's removal during training as in TaperNorm (Kanavalau et al. 2026, arXiv 2602.10408), which mixes the
outputs of the norm and of a constant factor, where the knee mixes their divisors.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Final

from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from hf_qknorm.files.log import logger
from hf_qknorm.model.knees import NO_NORM, check_norms, knee_of, set_knee
from hf_qknorm.norms import shown_knee

LEVELS: Final = 32  # steps of a schedule: a change must be large beside the training between two of them


class KneeSchedule(TrainerCallback, ExportableState):
    """Trainer callback: moves the model's knee to `target` over a `share` of the run, by `set_knee`.

    Calibrate the model before: the knee starts at its present value. It falls as (1 − done)², which is flat where the
    loss is most sensitive, in at most 32 steps. With a target above the start, such as math.inf for a model without
    norms, knee/(1 + knee) rises along a cosine, as TaperNorm's gate falls. In a bare loop, before each step:
    `set_knee(model, schedule.at(step, steps, start))`, with `start` the knee before the first step.

    The schedule begins with the run, or behind the part `after` of it: `KneeSchedule(0.25, math.inf, after=0.75)` keeps
    the bound of sharp norms while the learning rate is high and opens it as the rate falls, so that `remove_norms` can
    take them off at the end (recipes/results/removal.md).

    The knee lies in the weights, so that every checkpoint of the run holds its own, under DeepSpeed and FSDP and in an
    adapter too. A resumed run continues: load its model from the checkpoint, and calibrate at the first start alone
    (hf_qknorm/training/README.md). trainer_state.json holds the path: the knee at its beginning, and the run's length
    in steps, which a resumed run of another length keeps.

        >>> schedule = qk.KneeSchedule(share=0.5)
        >>> [schedule.at(step, steps=100, start=4.0) for step in (0, 25, 50)]
        [4.0, 1.0, 0.0]
        >>> trainer.add_callback(schedule)

    Raises ValueError for a `share` that is not in (0, 1], an `after` outside of [0, 1) or with which the schedule
    passes the end of the run, and an invalid `target`; when training begins, for a second KneeSchedule, a checkpoint of
    a run with another or none, and where `set_knee` does.
    """

    def __init__(self, share: float = 0.5, target: float = 0.0, *, after: float = 0.0) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share={share} of the run: expected more than 0 and at most 1")
        if not 0 <= after < 1 or after + share > 1:
            raise ValueError(
                f"after={after} of the run: expected at least 0 and less than 1, and with share={share} at most 1"
            )
        if not target >= 0:
            raise ValueError(f"target={target}: expected a knee, a number ≥ 0")
        self.share, self.after, self.target = share, after, min(target, NO_NORM)
        self.start = 0.0  # the knee at the path's beginning
        self.steps = 0  # of the run for which the path was made
        self.value: float | None = None  # the knee that was set last

    def at(self, step: int, steps: int, start: float) -> float:
        """The knee before step `step` (the first is 0) of a run of `steps` that begins with the knee `start`."""
        begin, length = self._span(steps)
        done = min(max(step - begin, 0) / length, 1.0)
        done = math.floor(LEVELS * done + 1e-9) / LEVELS
        if done in (0, 1):
            return self.target if done else start
        if self.target <= start:
            return self.target + (start - self.target) * (1 - done) ** 2
        first, last = (knee / (1 + knee) for knee in (start, self.target))
        constant = first + (last - first) * (1 - math.cos(math.pi * done)) / 2
        return constant / (1 - constant)

    def _span(self, steps: int) -> tuple[int, float]:
        """The first step and the length of the path in a run of `steps`; rounded down, it ends within the run."""
        return math.floor(self.after * steps + 1e-9), max(self.share * steps, 1.0)

    def state(self) -> dict[str, Any]:
        """The schedule's entry in trainer_state.json."""
        arguments = {"share": self.share, "target": self.target, "after": self.after}
        return {"args": arguments, "attributes": {"start": self.start, "steps": self.steps}}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        model, name = kwargs["model"], type(self).__name__
        entry: Any = state.stateful_callbacks.get(name)
        if isinstance(entry, list):
            raise ValueError(f"got {len(entry)} callbacks of type {name}, expected one")
        check_norms(model)
        self.value, self.start, self.steps = None, min(knee_of(model), NO_NORM), state.max_steps
        if state.global_step:
            before, own = entry and entry["args"], self.state()["args"]
            if before != own:
                raise ValueError(
                    f"the run of this checkpoint had {f'a {name} with {before}' if before else f'no {name}'}, and this "
                    f"one has {own}: resume with the same, or start a new run from the checkpoint's weights"
                )
            self.start, self.steps = entry["attributes"]["start"], entry["attributes"]["steps"]
        self.on_step_end(args, state, control, **kwargs)
        state.stateful_callbacks[name] = self.state()  # without an entry, saving raises KeyError
        end = math.ceil(sum(self._span(self.steps)))
        late = f", after this run's last step, {state.max_steps}" if end > state.max_steps else ""
        text = f"{shown_knee(self.value or 0.0)} now and {shown_knee(self.target)} from step {end} on{late}"
        logger.log(logging.WARNING if late else logging.INFO, f"{name}: the knee is {text}")

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        knee = self.at(state.global_step, self.steps, self.start)
        if knee != self.value:  # to look at the norms waits for a GPU
            set_knee(kwargs["model"], knee)
            self.value = knee
