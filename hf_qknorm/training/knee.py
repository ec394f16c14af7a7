"""A knee that goes down while a model trains: from the model that was converted to the plain scheme, in small steps.

With ε = knee·P, a vector of the calibration's mean length (mean |x|ᵖ = P) leaves a norm divided by (P + ε)^(1/p). When
the knee changes, gains change by the same power of (P + ε new)/(P + ε old), so that this vector keeps its length.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import chain
from typing import Any, Final

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_qknorm.model.attention import QKNormAttention, head_norms, norm_copies, patched_layers
from hf_qknorm.model.knees import apply_knee, powers_of, record_loaded_knee
from hf_qknorm.model.norms import HeadNorm

LEVELS: Final = 32  # of a schedule's way: few enough that a change is large beside the training between two of them
IN_16_BITS: Final = (torch.float16, torch.bfloat16)


@torch.no_grad()
def set_knee(model: nn.Module, knee: float) -> None:
    """Lower or raise the knee of a patched and calibrated model, in place, between two steps of training.

    Gains are rescaled, so that a vector of the calibration's mean length keeps its length. Where the keys have no gain
    (gain="scalar"), the queries' takes the keys' factor. At 0 the model is one of the plain scheme, for good: its ε
    buffers are gone from model and checkpoints, and the calibration's means with them.

    The optimizer must step the model's own weights: one with copies of its own, as DeepSpeed has, would overwrite the
    gains. PEFT's copies of a norm change with it; an adapter's file does not hold the knee: merge it, and save the
    whole model.

    Raises ValueError, with the model unchanged, for a model that is not patched, has no knee to change, or has no gains
    (gain="none"), for gains that are not here (offloaded, sharded by ZeRO-3, flattened by FSDP 1), and for a knee that
    the scheme can't have.
    """
    layers = _layers(model)
    if knee == knee_of(model):
        return
    _check_gains(layers)
    for layer in layers.values():
        dataclasses.replace(layer.scheme, knee=knee)  # raises for what is no knee
    powers = powers_of(model)
    factors = {
        (name, norm_name): _factor(norm, powers[name, norm_name], knee)
        for name, layer in layers.items()
        for norm_name, norm in head_norms(layer).items()
    }
    apply_knee(model, knee, powers)
    for name, layer in layers.items():
        norms = norm_copies(layer)
        for norm_name, copies in norms.items():
            factor = factors[name, norm_name]
            if norm_name == "q_norm" and "k_norm" in norms and norms["k_norm"][0].weight is None:
                factor *= factors[name, "k_norm"]
            for norm in copies:
                if norm.weight is not None:
                    _scale_gain(norm, factor)


def knee_of(model: nn.Module) -> float:
    """The knee of a patched model; 0 for the plain scheme. Raises ValueError for a model that is not patched."""
    return next(iter(_layers(model).values())).scheme.knee


class KneeSchedule(TrainerCallback, ExportableState):
    """Trainer callback: lowers the model's knee to `target` over the first `share` of the run, by `set_knee`.

    The knee at the beginning is the model's own: calibrate before. It goes down as (1 − done)², which is flat where the
    loss is most sensitive, in 32 steps at most. Checkpoints from the midst load as they are, and a run that is resumed
    goes on where it was; gains in 16 bits may then differ by a rounding.

    In a bare loop, before each step: `set_knee(model, schedule.at(step, steps, start))`, with `start` the knee that
    the model had before the first, `model.config.scheme.knee`.

    Raises ValueError for a `share` outside 0 to 1 and a `target` that is no knee; when training begins, for a model
    whose knee is not above `target`, for DeepSpeed, adapters and `load_best_model_at_end`, for what `set_knee` refuses,
    and for a checkpoint of a run without a KneeSchedule.
    """

    def __init__(self, share: float = 0.5, target: float = 0.0) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share={share} of the run: expected more than 0 and at most 1")
        if not (math.isfinite(target) and target >= 0):
            raise ValueError(f"target={target}: expected a knee, a finite number ≥ 0")
        self.share, self.target = share, target
        self.start: float | None = None  # the knee that the run began with
        self.knee: float | None = None  # the knee in force

    def at(self, step: int, steps: int, start: float) -> float:
        """The knee before step `step` (the first is 0) of a run of `steps` that begins with the knee `start`."""
        done = min(math.floor(LEVELS * step / max(self.share * steps, 1) + 1e-9) / LEVELS, 1.0)
        return self.target + (start - self.target) * (1 - done) ** 2

    def state(self) -> dict[str, Any]:
        """The schedule's entry in trainer_state.json."""
        arguments = {"share": self.share, "target": self.target}
        return {"args": arguments, "attributes": {"start": self.start, "knee": self.knee}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = kwargs["model"]
        _check_run(args, model)
        if state.global_step:
            self.start, knee = _saved(state)
            record_loaded_knee(model, knee)
        else:
            self.start = knee_of(model)
            if self.start <= self.target:
                raise ValueError(
                    f"the model's knee is {self.start:g}, and KneeSchedule lowers it to {self.target:g}: calibrate the "
                    "model with a larger one, or leave the schedule out"
                )
            _check_gains(_layers(model))
        self._set(model, state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._set(kwargs["model"], state)

    def _set(self, model: nn.Module, state: TrainerState) -> None:
        assert self.start is not None
        self.knee = self.at(state.global_step, state.max_steps, self.start)
        set_knee(model, self.knee)


def _layers(model: nn.Module) -> dict[str, QKNormAttention]:
    layers = patched_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} is not patched: call patch_model(model, scheme) first")
    return layers


def _check_gains(layers: dict[str, QKNormAttention]) -> None:
    """Raise ValueError for norms that have no knee, or no gains here that could be rescaled."""
    for name, layer in layers.items():
        if not layer.scheme.knee:
            raise ValueError(
                "this model has no knee to change, and no calibration to tell what a knee would be: "
                "calibrate(model, data, knee=...) gives it one"
            )
        if layer.scheme.gain == "none":
            raise ValueError(
                'gain="none": the norms have no gains to make up for another knee. Calibrate with the knee that is '
                'wanted, or patch with gain="shared"'
            )
        for weight in (norm.weight for norm in chain(*norm_copies(layer).values()) if norm.weight is not None):
            # ZeRO-3 marks what it shards by ds_id; FSDP 1 puts plain views in the place of parameters
            if weight.is_meta or hasattr(weight, "ds_id") or not isinstance(weight, nn.Parameter):
                raise ValueError(
                    f"the gains of {name} are not here to be rescaled (offloaded, or sharded by ZeRO-3 or FSDP 1): set "
                    "the knee before that, or shard by FSDP 2 or with use_orig_params=True"
                )


def _check_run(args: TrainingArguments, model: nn.Module) -> None:
    """Raise ValueError for a run that would not train with the gains that are rescaled, or not save the knee."""
    if getattr(args, "deepspeed_plugin", None) or getattr(args, "hf_deepspeed_config", None):
        raise ValueError(
            "DeepSpeed steps copies of the weights that it keeps in fp32, and would overwrite gains that KneeSchedule "
            "rescales: use DDP or FSDP 2, or set_knee(model, 0) before training"
        )
    if any(hasattr(module, "peft_config") for module in model.modules()):
        raise ValueError(
            "an adapter's checkpoint does not hold the knee of the model under it, which KneeSchedule changes: "
            "set_knee(model, 0) before the adapter is added, and save that model as its base"
        )
    if args.load_best_model_at_end:
        raise ValueError(
            "load_best_model_at_end puts weights of another knee into a model whose knee KneeSchedule has lowered: "
            "leave it out, and load trainer.state.best_model_checkpoint by from_pretrained"
        )


def _saved(state: TrainerState) -> tuple[float, float]:
    """The knee that a resumed run began with, and the one in force in its checkpoint."""
    found: Any = (state.stateful_callbacks or {}).get(KneeSchedule.__name__)
    if not isinstance(found, dict) or found["attributes"]["start"] is None:
        raise ValueError(
            "the checkpoint holds no state of one KneeSchedule: its run was trained without. Start a new run from its "
            "weights instead of resuming, or leave the schedule out"
        )
    return found["attributes"]["start"], found["attributes"]["knee"]


def _factor(norm: HeadNorm, power: float, knee: float) -> float:
    """The factor of a gain with which a vector of mean |x|ᵖ `power` keeps its length at another knee."""
    own = power + norm.scheme_eps ** (norm.order / 2)
    return ((own + knee * power) / (own + norm.knee * power)) ** (1 / norm.order)


def _scale_gain(norm: HeadNorm, factor: float) -> None:
    """Multiply the norm's gain; while there is a knee, `rest` keeps the part of the product beyond 16 bits.

    Without it the roundings of many small steps would add up to several units in the last place.
    """
    weight: Any = norm.weight
    if weight.dtype not in IN_16_BITS:
        weight.mul_(factor)
        return
    rest: Any = norm._buffers.get("rest")
    exact = (weight.float() if rest is None else weight.float() + rest) * factor
    weight.copy_(exact)
    if norm.knee:
        norm.register_buffer("rest", exact - weight.float(), persistent=False)
    elif rest is not None:
        del norm.rest
