"""Move a model's knee while it trains, in small steps: down to the plain scheme, or up to a model without norms.

Upwards, with t = knee/(1 + knee), the norm divides x by √((1 − t)·mean x² + t·P), up to ε: at t = 1 by a constant. This
is a norm's removal during training as in TaperNorm (Kanavalau et al. 2026, arXiv 2602.10408), which mixes the
outputs of the norm and of a constant factor, where the knee mixes their divisors.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Final

from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from hf_qknorm.files.log import logger
from hf_qknorm.model.attention import every_norm
from hf_qknorm.model.knees import NO_NORM, check_norms, knee_of, set_knee
from hf_qknorm.ops.norms import shown_knee

LEVELS: Final = 32  # steps of a schedule: a change must be large beside the training between two of them
ROUNDING: Final = 0.2  # of a knee in a norm's shape, at most


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
    adapter too, and a resumed run continues: load its model from the checkpoint, and calibrate at the first start alone
    (hf_qknorm/training/README.md). The path is fixed when the run begins: the first step, the knee there, and
    the length in steps, which is a `share` of the run, or `steps` if given. trainer_state.json holds it, so that a
    resumed run of any length follows the same path. If the arguments differ from the checkpoint's, a new path begins at
    the present step and knee; `share` and `after` are then parts of the steps left. The knee never moves away from its
    target, and stays there in a second `train()`.

        >>> schedule = qk.KneeSchedule(share=0.5)
        >>> [schedule.at(step, steps=100, start=4.0) for step in (0, 25, 50)]
        [4.0, 1.0, 0.0]
        >>> trainer.add_callback(schedule)

    Raises ValueError for a `share` that is not in (0, 1], `steps` below 1, an `after` outside of [0, 1) or with which
    the schedule passes the end of the run, and an invalid `target`; when training begins, for a second KneeSchedule, a
    model with the knee `target`, a checkpoint of a run without a KneeSchedule, and where `set_knee` does.
    """

    def __init__(
        self, share: float = 0.5, target: float = 0.0, steps: int | None = None, *, after: float = 0.0
    ) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share={share} of the run: expected more than 0 and at most 1")
        if not 0 <= after < 1 or (steps is None and after + share > 1):
            raise ValueError(
                f"after={after} of the run: expected at least 0 and less than 1, and with share={share} at most 1"
            )
        if steps is not None and not steps >= 1:
            raise ValueError(f"steps={steps}: expected the length of the schedule, at least 1, or None to use share")
        if not target >= 0:
            raise ValueError(f"target={target}: expected a knee, a number ≥ 0")
        self.share, self.steps, self.after, self.target = share, steps, after, min(target, NO_NORM)
        self.begin = 0  # the path's first step
        self.start: float | None = None  # the knee at the path's beginning
        self.length: float | None = None  # of the path, in steps
        self.last = 0  # the last step of the run for which the path was fixed
        self.value: float | None = None  # the present knee
        self._asked: float | None = None  # the path's number at the last step

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that make an equal schedule."""
        return {"share": self.share, "target": self.target, "steps": self.steps, "after": self.after}

    def at(self, step: int, steps: int, start: float) -> float:
        """The knee before step `step` (the first is 0) of a run of `steps` that begins with the knee `start`."""
        begin, length = self._span(steps)
        return self._path(min(max(step - begin, 0) / length, 1.0), start)

    def state(self) -> dict[str, Any]:
        """The schedule's entry in trainer_state.json."""
        names = ("begin", "start", "length", "last", "value")
        return {"args": self.arguments, "attributes": {name: getattr(self, name) for name in names}}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        model, name = kwargs["model"], type(self).__name__
        entry: Any = state.stateful_callbacks.get(name)
        if isinstance(entry, list):
            raise ValueError(f"got {len(entry)} callbacks of type {name}, expected one")
        check_norms(every_norm(model))
        self.value = min(knee_of(model), NO_NORM)
        if state.global_step:
            event = self._resume(state, entry)
        else:
            event = "begins"
            if self.value == self.target and self.start is None:  # not a second `train()` after the path's end
                raise ValueError(
                    f"the model's knee is {shown_knee(self.value)}, which is KneeSchedule's target: calibrate the "
                    "model with another one, as calibrate(model, data, knee=4), or leave the schedule out"
                )
            self._begin(0, self.value, state.max_steps)
        self.on_step_end(args, state, control, **kwargs)
        state.stateful_callbacks[name] = self.state()  # without an entry, saving raises KeyError
        self._log(event, state.max_steps)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        assert self.start is not None
        assert self.length is not None
        done = min(max(state.global_step - self.begin, 0) / self.length, 1.0)
        further = min if self.target < self.start else max
        path = self._path(done, self.start)
        if path == self._asked:  # to look at the norms waits for a GPU
            return
        self._asked = path
        present = min(knee_of(kwargs["model"]), NO_NORM)  # moved by hand, or the path's own, rounded by each norm
        self.value = path if math.isclose(present, path, rel_tol=ROUNDING) else further(path, present)
        set_knee(kwargs["model"], self.value)

    def _path(self, done: float, start: float) -> float:
        """The knee after the part `done` of the path, from 0 (it is `start`) to 1 (it is `target`)."""
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
        return math.floor(self.after * steps + 1e-9), float(self.steps or max(self.share * steps, 1))

    def _begin(self, step: int, start: float, steps: int) -> None:
        """Fix the path of a schedule that is given at a step, with `steps` of the run ahead."""
        begin, self.length = self._span(steps)
        self._asked = None
        self.begin, self.start, self.last = step + begin, start, step + steps

    def _resume(self, state: TrainerState, entry: Mapping[str, Any] | None) -> str:
        """Follow the path of a checkpoint, or begin another if the arguments differ. Returns the event for the log."""
        assert self.value is not None
        if entry is None:
            raise ValueError(
                "the checkpoint holds no state of one KneeSchedule: its run was trained without. Start a new run "
                "from its weights instead of resuming, or leave the schedule out"
            )
        found, before, step = entry["attributes"], entry["args"], state.global_step
        if changed := {name: value for name, value in self.arguments.items() if value != before[name]}:
            self._begin(step, self.value, state.max_steps - step)
            return f"begins again at step {step} ({', '.join(f'{name}={value}' for name, value in changed.items())})"
        self.begin, self.start, self.length, self.last = (found[x] for x in ("begin", "start", "length", "last"))
        kept = "" if self._span(self.last) == self._span(state.max_steps) else " with the length in the checkpoint"
        return f"continues{kept}"

    def _log(self, event: str, last: int) -> None:
        """Log what happens in a run that ends at step `last`: a warning, unless it follows from the arguments alone."""
        assert self.length is not None
        assert self.value is not None
        end, usual = math.ceil(self.begin + self.length), event in ("begins", "continues")
        target = shown_knee(self.target)
        text = f"is {shown_knee(self.value)} now and {target} from step {end} on"
        if self.value == self.target:
            text = f"stays at {target}"
        elif end > last:
            usual, text = False, f"{text}, after this run's last step, {last}; `steps` sets another length"
        logger.log(logging.INFO if usual else logging.WARNING, f"KneeSchedule {event}: the knee {text}")
