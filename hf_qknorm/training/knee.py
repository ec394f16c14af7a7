"""Move a model's knee while it trains, in small steps: down to the plain scheme, or up to a model without norms.

Upwards, with t = knee/(1 + knee), the norm divides x by √((1 − t)·mean x² + t·P), up to ε: at t = 1 by a constant. This
is a norm's removal during training as in TaperNorm (Kanavalau et al. 2026, arXiv 2602.10408), which mixes the
outputs of the norm and of a constant factor, where the knee mixes their divisors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from torch import nn
from transformers import TrainerState, TrainingArguments

from hf_qknorm.model.adapters import is_adapted
from hf_qknorm.model.attention import require_patched
from hf_qknorm.model.knees import NO_NORM, check_gains, knee_of, record_loaded_knee, set_knee
from hf_qknorm.training.schedule import Schedule

LEVELS: Final = 32  # steps of a schedule: a change must be large beside the training between two of them


class KneeSchedule(Schedule):
    """Trainer callback: moves the model's knee to `target` over a `share` of the run, by `set_knee`.

    Calibrate the model before: the knee starts at its present value. It falls as (1 − done)², which is flat where the
    loss is most sensitive, in at most 32 steps. With a target above the start, such as math.inf for a model without
    norms, knee/(1 + knee) rises along a cosine, as TaperNorm's gate falls. In a bare loop, before each step:
    `set_knee(model, schedule.at(step, steps, start))`, with `start` the knee before the first step.

    The schedule begins with the run, or behind the part `after` of it: `KneeSchedule(0.25, math.inf, after=0.75)` keeps
    the bound of sharp norms while the learning rate is high and opens it as the rate falls, so that `remove_norms` can
    take them off at the end (recipes/results/seat_belt.md).

    Checkpoints during the run can be loaded, and a resumed run continues; gains in 16 bits may then differ by a
    rounding. `steps`, the length of resumed runs and their log are as in `BlendSchedule`: the knee never moves away
    from its target.

        >>> schedule = qk.KneeSchedule(share=0.5)
        >>> [schedule.at(step, steps=100, start=4.0) for step in (0, 25, 50)]
        [4.0, 1.0, 0.0]
        >>> trainer.add_callback(schedule)

    Raises ValueError for a `share` that is not in (0, 1], `steps` below 1, an `after` outside of [0, 1) or with which
    the schedule passes the end of the run, and an invalid `target`; when training begins, for a second KneeSchedule, a
    model with the knee `target`, DeepSpeed, adapters, `load_best_model_at_end`, a checkpoint of a run without a
    KneeSchedule, and where `set_knee` does.
    """

    noun = "knee"
    settings = ("share", "target", "steps", "after")

    def __init__(
        self, share: float = 0.5, target: float = 0.0, steps: int | None = None, *, after: float = 0.0
    ) -> None:
        super().__init__(share, steps, after)
        if not target >= 0:
            raise ValueError(f"target={target}: expected a knee, a number ≥ 0")
        self.target = min(target, NO_NORM)

    def at(self, step: int, steps: int, start: float) -> float:
        """The knee before step `step` (the first is 0) of a run of `steps` that begins with the knee `start`."""
        return self.path(self.done(step, steps), start)

    def path(self, done: float, start: float) -> float:
        done = math.floor(LEVELS * done + 1e-9) / LEVELS
        if done in (0, 1):
            return self.target if done else start
        if self.target <= start:
            return self.target + (start - self.target) * (1 - done) ** 2
        first, last = (knee / (1 + knee) for knee in (start, self.target))
        constant = first + (last - first) * (1 - math.cos(math.pi * done)) / 2
        return constant / (1 - constant)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        _check_run(args, kwargs["model"])
        super().on_train_begin(args, state, control, **kwargs)

    def first(self, model: nn.Module) -> float:
        start = knee_of(model)
        if start == self.target:
            raise ValueError(
                f"the model's knee is {start:g}, which is KneeSchedule's target: calibrate the model with "
                "another one, as calibrate(model, data, knee=4), or leave the schedule out"
            )
        check_gains(require_patched(model))
        return start

    def restore(self, model: nn.Module, found: Mapping[str, Any], done: float) -> float:
        if found.get("start") is None:
            raise ValueError(
                "the checkpoint holds no state of one KneeSchedule: its run was trained without. Start a new run "
                "from its weights instead of resuming, or leave the schedule out"
            )
        knee = found.get("value", found.get("knee"))  # "knee": older versions
        if knee == 0 or knee_of(model):  # a model whose knee was ended by hand has none to record
            record_loaded_knee(model, knee)
        return knee_of(model)

    def present(self, model: nn.Module) -> float:
        return knee_of(model)

    put = staticmethod(set_knee)


def _check_run(args: TrainingArguments, model: nn.Module) -> None:
    """Raise ValueError for a run that would not train the rescaled gains, or not save the knee."""
    if getattr(args, "deepspeed_plugin", None) or getattr(args, "hf_deepspeed_config", None):
        raise ValueError(
            "DeepSpeed steps copies of the weights in fp32, and would overwrite the gains that KneeSchedule rescales: "
            "use DDP or FSDP 2, or set_knee(model, 0) before training"
        )
    if is_adapted(model):
        raise ValueError(
            "an adapter's checkpoint does not hold the knee of the base model, which KneeSchedule changes: "
            "set_knee(model, 0) before the adapter is added, and save that model as its base"
        )
