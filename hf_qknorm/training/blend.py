"""An exact start: the scheme comes in step by step, from a model that computes what it did before.

With a blend b each norm gives x + b·(y − x), and the cap c is in force as c/b: nothing has changed at 0, and at 1 the
layer is the plain scheme. The cap moves in quarters of b: torch.compile makes a program for every value that it has.
"""

from __future__ import annotations

import dataclasses
import math
from itertools import chain
from typing import Any, Literal

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_qknorm.model.attention import QKNormAttention, end_blend, head_norms, norm_copies, patched_layers, start_blend

CAP_LEVELS = 4
Shape = Literal["linear", "cosine"]


def set_blend(model: nn.Module, blend: float) -> None:
    """Bring in the scheme of a patched model, norms and cap, up to `blend` from 0 (as unpatched) to 1 (for good).

    The blend is a buffer of the norms: it is saved and loaded. At 1 it is gone from model, config and checkpoints.

    Raises ValueError for a model that is not patched, a blend outside 0 to 1, and a scheme without the norm before
    attention, which has no way back to 0.
    """
    layers = _layers(model)
    config: Any = layers[0].config
    if not config.scheme.pre_norm:
        raise ValueError("pre_norm=False removed the norm before attention: that can't be blended in")
    _check(blend)
    if config.qk_norm_blend is None and blend < 1:
        for layer in layers:
            start_blend(layer)
        config.qk_norm_blend = {"norms": True, "softcap": config.scheme.softcap}
    if config.qk_norm_blend is None:
        return
    if not config.qk_norm_blend["norms"]:
        raise ValueError("the cap is on its way by itself (CapSchedule, set_cap): end that before a blend is begun")
    for layer in layers:
        for norm in chain(*norm_copies(layer).values()):
            if norm.blend is not None:
                norm.blend.fill_(blend)
        if blend == 1:
            end_blend(layer)
    _put_cap(layers, blend)


def set_cap(model: nn.Module, blend: float) -> None:
    """Bring in the cap c of a patched model alone, as c/`blend`: no cap at 0, the scheme's at 1, in quarters.

    Raises ValueError for a model that is not patched, has no cap to come, or is in a blend, and for a `blend` outside
    0 to 1.
    """
    layers = _layers(model)
    config: Any = layers[0].config
    _check(blend)
    if config.qk_norm_blend is None and config.scheme.softcap is None:
        raise ValueError(f"the scheme has no cap to bring in ({config.scheme}): patch the model with one that has")
    if config.qk_norm_blend is None and blend < 1:
        config.qk_norm_blend = {"norms": False, "softcap": config.scheme.softcap}
    if config.qk_norm_blend is None:
        return
    if config.qk_norm_blend["norms"]:
        raise ValueError("this model is in a blend, which brings in the cap as well: leave out CapSchedule and set_cap")
    _put_cap(layers, blend)


def blend_of(model: nn.Module) -> float:
    """How far the scheme of a patched model is in: 1 unless it is in a blend."""
    norms = [norm for layer in _layers(model) for norm in head_norms(layer).values()]
    return next((float(norm.blend) for norm in norms if norm.blend is not None), 1.0)


class _Schedule(TrainerCallback):
    """Sets a blend from the step alone, so that a resumed run goes on where it was."""

    def __init__(self, share: float = 0.5, shape: Shape = "linear") -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share={share} of the run: expected more than 0 and at most 1")
        if shape not in ("linear", "cosine"):
            raise ValueError(f'shape={shape!r}: expected "linear" or "cosine"')
        self.share, self.shape = share, shape

    def at(self, step: int, steps: int) -> float:
        """The blend before step `step` (the first is 0) of a run of `steps`."""
        done = min(step / max(self.share * steps, 1), 1.0)
        return done if self.shape == "linear" else (1 - math.cos(math.pi * done)) / 2

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.set(kwargs["model"], self.at(state.global_step, state.max_steps))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.set(kwargs["model"], self.at(state.global_step, state.max_steps))

    def set(self, model: nn.Module, blend: float) -> None:
        raise NotImplementedError


class BlendSchedule(_Schedule):
    """Trainer callback: brings the scheme in, norms and cap, over the first `share` of the run (`set_blend`).

    Calibrate before, by "moments" or "fit": gains that fit make the way short, but "fit_qk" moves the start away.
    In a bare loop: `set_blend(model, schedule.at(step, steps))`.
    """

    def set(self, model: nn.Module, blend: float) -> None:
        set_blend(model, blend)


class CapSchedule(_Schedule):
    """Trainer callback: lowers the cap to the scheme's over the first `share` of the run, as c/b (`set_cap`)."""

    def set(self, model: nn.Module, blend: float) -> None:
        set_cap(model, blend)


def _layers(model: nn.Module) -> list[QKNormAttention]:
    layers = list(patched_layers(model).values())
    if not layers:
        raise ValueError(f"{type(model).__name__} is not patched: call patch_model(model, scheme) first")
    return layers


def _check(blend: float) -> None:
    if not 0 <= blend <= 1:
        raise ValueError(f"blend={blend}: expected a number from 0 (as unpatched) to 1 (the whole scheme)")


def _put_cap(layers: list[QKNormAttention], blend: float) -> None:
    """Put the cap that is in force at `blend` into layers and config; at 1, forget that it was on its way."""
    config: Any = layers[0].config
    end = config.qk_norm_blend["softcap"]
    own = (config.qk_norm_base or {}).get("attn_logit_softcapping")  # a family's own cap is where it starts from
    if end is not None:
        done = math.floor(blend * CAP_LEVELS + 1e-9) / CAP_LEVELS  # a cosine may miss a quarter by a bit
        inverse = done / end + (0 if own is None else (1 - done) / own)
        cap = end if done == 1 else None if done == 0 else 1 / inverse
        scheme = dataclasses.replace(config.scheme, softcap=cap)
        config.set_scheme(scheme)
        for layer in layers:
            layer.scheme = scheme
    if blend == 1:
        config.qk_norm_blend = None
