"""`Schedule`: moves a number of a model in training, by a path that checkpoints hold."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

logger = logging.getLogger(__name__)


class Schedule(ABC, TrainerCallback, ExportableState):
    """Moves a number of the model to `target`, over a `share` of the run, or over `steps` if given.

    It begins with the run, or behind the part `after` of it. The path is fixed then: the first step, the number there,
    and the length in steps. trainer_state.json holds it, so that a resumed run of any length follows the same path. If
    the arguments differ from the checkpoint's, a new path begins at the present step and number; `share` and `after`
    are then parts of the steps left. Within a run, and from a run to the one that resumes it, the number never moves
    away from the target.
    """

    target: float
    noun: ClassVar[str]  # the number's name in the log
    settings: ClassVar[tuple[str, ...]]  # the names of the arguments

    def __init__(self, share: float, steps: int | None, after: float = 0.0) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share={share} of the run: expected more than 0 and at most 1")
        if not 0 <= after < 1 or (steps is None and after + share > 1):
            raise ValueError(
                f"after={after} of the run: expected at least 0 and less than 1, and with share={share} at most 1"
            )
        if steps is not None and not steps >= 1:
            raise ValueError(f"steps={steps}: expected the length of the schedule, at least 1, or None to use share")
        self.share, self.steps, self.after = share, steps, after
        self.begin = 0  # the path's first step
        self.start: float | None = None  # the number at the path's beginning
        self.length: float | None = None  # of the path, in steps
        self.value: float | None = None  # the present number

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that make an equal schedule."""
        return {name: getattr(self, name) for name in self.settings}

    @abstractmethod
    def path(self, done: float, start: float) -> float:
        """The number after the part `done` of the path, from 0 (the number is `start`) to 1 (it is `target`)."""

    @abstractmethod
    def first(self, model: nn.Module) -> float:
        """The number that a new run starts from. Raises ValueError for a model that has nothing to move."""

    @abstractmethod
    def restore(self, model: nn.Module, found: Mapping[str, Any], done: float) -> float:
        """Bring a model with the weights of a checkpoint to the checkpoint's number, and return that.

        `found` is the checkpoint's `state()["attributes"]`, empty if the checkpoint has none. `done` is the part of the
        schedule behind it if the run was as long as this one. Raises ValueError if the number is not known.
        """

    @abstractmethod
    def present(self, model: nn.Module) -> float:
        """The model's number, `value` unless the model was changed by hand. Does not wait for the device."""

    @abstractmethod
    def put(self, model: nn.Module, value: float, /) -> None:
        """Set the model's number."""

    def done(self, step: int, steps: int) -> float:
        """The part of the schedule before step `step` (the first is 0) of a run of `steps`, from 0 to 1."""
        return min(max(step - self.after * steps, 0) / self._length(steps), 1.0)

    def state(self) -> dict[str, Any]:
        """The schedule's entry in trainer_state.json."""
        names = ("begin", "start", "length", "value")
        return {"args": self.arguments, "attributes": {name: getattr(self, name) for name in names}}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        model, name = kwargs["model"], type(self).__name__
        if args.load_best_model_at_end:
            raise ValueError(
                f"load_best_model_at_end loads weights for another {self.noun} than the one that {name} has set: "
                "leave it out, and load trainer.state.best_model_checkpoint by from_pretrained"
            )
        entry: Any = state.stateful_callbacks.get(name)
        if isinstance(entry, list):
            raise ValueError(f"got {len(entry)} callbacks of type {name}, expected one")
        if state.global_step:
            event = self._resume(model, state, entry or {"args": {}, "attributes": {}})
        else:
            event = "begins"
            start = self.first(model)
            self.put(model, start)
            self._begin(0, start, state.max_steps)
        self.on_step_end(args, state, control, **kwargs)
        state.stateful_callbacks[name] = self.state()  # without an entry, saving raises KeyError
        if state.is_world_process_zero:
            self._log(event, state.max_steps)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        assert self.start is not None
        assert self.length is not None
        done = min(max(state.global_step - self.begin, 0) / self.length, 1.0)
        further = min if self.target < self.start else max
        self.value = further(self.path(done, self.start), self.present(kwargs["model"]))
        self.put(kwargs["model"], self.value)

    def _length(self, steps: int) -> float:
        return float(self.steps or max(self.share * steps, 1))

    def _begin(self, step: int, start: float, steps: int) -> None:
        """Fix the path of a schedule that is given at a step, with `steps` of the run ahead."""
        self.begin, self.length = step + round(self.after * steps), self._length(steps)
        self.start = self.value = start

    def _resume(self, model: nn.Module, state: TrainerState, entry: Mapping[str, Any]) -> str:
        """Follow the path of a checkpoint, or begin another if the arguments differ. Returns the event for the log."""
        found, step = entry["attributes"], state.global_step
        self.value = self.restore(model, found, 0.0 if self.steps else self.done(step, state.max_steps))
        before = {**self.arguments, "steps": None, "after": 0.0, **entry["args"]}  # older versions had neither
        if changed := {name: value for name, value in self.arguments.items() if value != before[name]}:
            self._begin(step, self.value, state.max_steps - step)
            return f"begins again at step {step} ({', '.join(f'{name}={value}' for name, value in changed.items())})"
        if found.get("length") is None:  # older versions, whose schedules began with the run
            self.begin, self.start, self.length = 0, found.get("start") or 0.0, self._length(state.max_steps)
            return "finds no length in the checkpoint and takes this run's"
        self.begin, self.start, self.length = found["begin"], found["start"], found["length"]
        kept = "" if self.length == self._length(state.max_steps - self.begin) else " with the length in the checkpoint"
        return f"continues{kept}"

    def _log(self, event: str, last: int) -> None:
        """Log what happens in a run that ends at step `last`: a warning, unless it follows from the arguments alone."""
        assert self.length is not None
        end, usual = math.ceil(self.begin + self.length), event in ("begins", "continues")
        text = f"is {self.value:.4g} now and {self.target:.4g} from step {end} on"
        if self.value == self.target:
            text = f"stays at {self.target:.4g}"
        elif end > last:
            usual, text = False, f"{text}, after this run's last step, {last}; `steps` sets another length"
        logger.log(logging.INFO if usual else logging.WARNING, f"{type(self).__name__} {event}: the {self.noun} {text}")
