"""Move a model's knee while it trains, in small steps: down to the plain scheme, or up to a model without norms.

With ε = knee·P, a norm divides a vector of the calibration's mean length (mean |x|ᵖ = P) by (P + ε)^(1/p), or with a
sharpness s by (Pˢ + εˢ)^(1/ps). When the knee changes, the gain is multiplied by the ratio of the new divisor to the
old one, so that this vector keeps its length.

Upwards, with t = knee/(1 + knee), the norm divides x by √((1 − t)·mean x² + t·P), up to ε: at t = 1 by a constant. This
is a norm's removal during training as in TaperNorm (Kanavalau et al. 2026, arXiv 2602.10408), which mixes the norm's
output with that of a constant factor, where the knee mixes what both divide by.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from itertools import chain
from typing import Any, Final

import torch
from torch import nn
from transformers import TrainerState, TrainingArguments

from hf_qknorm.model.attention import QKNormAttention, head_norms, norm_copies, require_patched
from hf_qknorm.model.knees import NO_NORM, apply_knee, powers_of, record_loaded_knee
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.training.schedule import Schedule

LEVELS: Final = 32  # steps of a schedule: a change must be large beside the training between two of them


@torch.no_grad()
def set_knee(model: nn.Module, knee: float) -> None:
    """Set the knee of a patched and calibrated model, in place, between two steps of training.

    Gains are rescaled so that a vector of the calibration's mean length keeps its length. Where the keys have no gain
    (gain="scalar"), the queries' gain takes the keys' factor. A knee of 0 ends this for good: the ε buffers and the
    calibration's means are removed from the model and later checkpoints. A knee of ∞ is stored as 2³⁰: the norms then
    multiply by a constant, and `remove_norms` can fold them away.

    The optimizer must step the model's own weights: copies such as DeepSpeed's would overwrite the gains. PEFT's copies
    of a norm are changed too; an adapter's file does not hold the knee, so merge the adapter and save the whole model.

        >>> _ = qk.calibrate(qk.patch_model(model, "qk_norm"), texts, knee=4.0)
        >>> qk.set_knee(model, 2.0)
        >>> model.config.scheme.knee
        2.0

    Raises ValueError, with the model unchanged, for a model that is not patched, has no knee, or has no gains
    (gain="none"), for gains that are offloaded, sharded by ZeRO-3 or flattened by FSDP 1, for gains in float16 that
    would overflow, and for an invalid knee.
    """
    layers, knee = require_patched(model), min(knee, NO_NORM)
    if knee == knee_of(model):
        return
    _check_gains(layers)
    dataclasses.replace(next(iter(layers.values())).scheme, knee=knee)  # raises for an invalid knee
    powers = powers_of(model)
    scaled: list[tuple[HeadNorm, float]] = []
    for name, layer in layers.items():
        factors = {n: _factor(norm, powers[name, n], knee) for n, norm in head_norms(layer).items()}
        copies = norm_copies(layer)
        if copies.keys() >= {"q_norm", "k_norm"} and copies["k_norm"][0].weight is None:
            factors["q_norm"] *= factors["k_norm"]
        scaled += [(norm, factors[n]) for n, norms in copies.items() for norm in norms if norm.weight is not None]
    _check_range(scaled)
    apply_knee(model, knee, powers)
    for norm, factor in scaled:
        _scale_gain(norm, factor)


def knee_of(model: nn.Module) -> float:
    """The knee of a patched model; 0 for the plain scheme. Raises ValueError for a model that is not patched."""
    return next(iter(require_patched(model).values())).scheme.knee


class KneeSchedule(Schedule):
    """Trainer callback: moves the model's knee to `target` over the first `share` of the run, by `set_knee`.

    Calibrate the model before: the knee starts at its present value. It falls as (1 − done)², which is flat where the
    loss is most sensitive, in at most 32 steps. With a target above the start, such as math.inf for a model without
    norms (`start_removal`), knee/(1 + knee) rises along a cosine, as TaperNorm's gate falls. In a bare loop, before
    each step: `set_knee(model, schedule.at(step, steps, start))`, with `start` the knee before the first step.

    Checkpoints during the run can be loaded, and a resumed run continues; gains in 16 bits may then differ by a
    rounding. `steps`, the length of resumed runs and their log are as in `BlendSchedule`: the knee never moves away
    from its target.

        >>> schedule = qk.KneeSchedule(share=0.5)
        >>> [schedule.at(step, steps=100, start=4.0) for step in (0, 25, 50)]
        [4.0, 1.0, 0.0]
        >>> trainer.add_callback(schedule)

    Raises ValueError for a `share` that is not in (0, 1], `steps` below 1 and an invalid `target`; when training
    begins, for a second KneeSchedule, a model with the knee `target`, DeepSpeed, adapters, `load_best_model_at_end`,
    all that `set_knee` refuses, and a checkpoint of a run without a KneeSchedule.
    """

    noun = "knee"

    def __init__(self, share: float = 0.5, target: float = 0.0, steps: int | None = None) -> None:
        super().__init__(share, steps)
        if not target >= 0:
            raise ValueError(f"target={target}: expected a knee, a number ≥ 0")
        self.target = min(target, NO_NORM)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"share": self.share, "target": self.target, "steps": self.steps}

    def at(self, step: int, steps: int, start: float) -> float:
        """The knee before step `step` (the first is 0) of a run of `steps` that begins with the knee `start`."""
        return self.path(self.done(step, steps), start)

    def path(self, done: float, start: float) -> float:
        done = math.floor(LEVELS * done + 1e-9) / LEVELS
        if self.target <= start or done in (0, 1):
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
        _check_gains(require_patched(model))
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


def _check_gains(layers: dict[str, QKNormAttention]) -> None:
    """Raise ValueError for norms without a knee, or without gains that can be rescaled here."""
    for name, layer in layers.items():
        if not layer.scheme.knee:
            raise ValueError(
                "this model has no knee to change, and no calibration that measured its vectors: "
                "calibrate(model, data, knee=...) sets one, and start_removal(model, data) prepares norms for removal"
            )
        if layer.scheme.gain == "none":
            raise ValueError(
                'gain="none": the norms have no gains to compensate another knee. Calibrate with the knee that you '
                'want, or patch with gain="shared"'
            )
        for weight in (norm.weight for norm in chain(*norm_copies(layer).values()) if norm.weight is not None):
            # ZeRO-3 sets ds_id on parameters; FSDP 1 replaces parameters by views that are none
            if weight.is_meta or hasattr(weight, "ds_id") or not isinstance(weight, nn.Parameter):
                raise ValueError(
                    f"the gains of {name} cannot be rescaled (offloaded, or sharded by ZeRO-3 or FSDP 1): set "
                    "the knee before that, or shard by FSDP 2 or with use_orig_params=True"
                )


def _check_range(scaled: list[tuple[HeadNorm, float]]) -> None:
    """Raise ValueError for gains in float16 that their factors would make infinite."""
    for norm, factor in scaled:
        weight: Any = norm.weight
        if weight.dtype == torch.float16 and float(weight.abs().max()) * factor > torch.finfo(torch.float16).max:
            raise ValueError(
                f"a gain in float16 would be multiplied by {factor:.4g}, beyond its range: train in float32 or bfloat16"
            )


def _check_run(args: TrainingArguments, model: nn.Module) -> None:
    """Raise ValueError for a run that would not train the rescaled gains, or not save the knee."""
    if getattr(args, "deepspeed_plugin", None) or getattr(args, "hf_deepspeed_config", None):
        raise ValueError(
            "DeepSpeed steps copies of the weights in fp32, and would overwrite the gains that KneeSchedule rescales: "
            "use DDP or FSDP 2, or set_knee(model, 0) before training"
        )
    if any(hasattr(module, "peft_config") for module in model.modules()):
        raise ValueError(
            "an adapter's checkpoint does not hold the knee of the base model, which KneeSchedule changes: "
            "set_knee(model, 0) before the adapter is added, and save that model as its base"
        )
    if args.load_best_model_at_end:
        raise ValueError(
            "load_best_model_at_end loads weights for another knee than the one that KneeSchedule has set: "
            "leave it out, and load trainer.state.best_model_checkpoint by from_pretrained"
        )


def _factor(norm: HeadNorm, power: float, knee: float) -> float:
    """The factor on a gain that keeps the length of a vector of mean |x|ᵖ `power` at another knee."""
    return norm.keeping_gain(knee, power) / norm.keeping_gain(norm.knee, power)


def _scale_gain(norm: HeadNorm, factor: float) -> None:
    """Multiply the norm's gain; while there is a knee, the buffer `rest` holds the product's rounding error in 16 bits.

    Without it, the errors of many small steps would add up to several units in the last place.
    """
    weight: Any = norm.weight
    if weight.dtype.itemsize > 2:
        weight.mul_(factor)
        return
    rest: Any = norm._buffers.get("rest")
    exact = (weight.float() if rest is None else weight.float() + rest) * factor
    weight.copy_(exact)
    if norm.knee:
        norm.register_buffer("rest", exact - weight.float(), persistent=False)
    elif rest is not None:
        del norm.rest
