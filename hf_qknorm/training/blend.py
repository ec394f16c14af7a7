"""Schedules that bring the scheme in step by step, from a model with the outputs of the unpatched one.

With a blend b, each norm gives x + b·(y − x), and the cap c acts as c/b: 0 is the unpatched layer, 1 is the layer with
the scheme. The cap moves in quarters of b, because torch.compile compiles a program for each value of the cap.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import chain
from typing import Any, Literal

from torch import nn
from transformers import TrainerCallback, TrainerState

from hf_qknorm.files.formatting import shorten
from hf_qknorm.model.attention import QKNormAttention, end_blend, norm_copies, require_patched, start_blend
from hf_qknorm.scheme import LEARNED

CAP_LEVELS = 4
Shape = Literal["linear", "cosine"]


def set_blend(model: nn.Module, blend: float) -> None:
    """Set how far the scheme of a patched model is in, norms and cap: from 0 (as unpatched) to 1 (the whole scheme).

    The blend is a buffer of the norms, which checkpoints hold. 1 ends the blend: the buffers are removed from the
    model, its config and later checkpoints. A learned temperature and learned sinks are no part of the blend: they act
    from the start, where the temperature changes nothing, and the sinks next to nothing.

        >>> ids = torch.arange(8)[None]
        >>> before = model(ids).logits
        >>> qk.set_blend(qk.patch_model(model, "qk_norm"), 0.0)
        >>> torch.equal(model(ids).logits, before)
        True

    Raises ValueError for a model that is not patched, a blend outside 0 to 1, a cap that `set_cap` moves, a scheme with
    pre_norm=False, which removed the norm before attention, and below 1 for one of a temperature and sinks alone, or
    with a scale and no norm of queries or keys.
    """
    layers = _layers_in_blend(model, blend, norms=True)
    for layer in layers:
        for norm in chain(*norm_copies(layer).values()):
            if norm.blend is not None:
                norm.blend.fill_(blend)
        if blend == 1:
            end_blend(layer)
    _set_cap(layers, blend)


def set_cap(model: nn.Module, blend: float) -> None:
    """Set the cap c of a patched model alone to c/`blend`: no cap at 0, the scheme's cap at 1, in quarters.

        >>> qk.set_cap(qk.patch_model(model, "soft_cap"), 0.5)  # the scheme's cap is 50
        >>> model.config.scheme.softcap
        100.0

    Raises ValueError for a model that is not patched, whose scheme has no cap, or that is in a blend, and for a `blend`
    outside 0 to 1.
    """
    _set_cap(_layers_in_blend(model, blend, norms=False), blend)


class Schedule(TrainerCallback):
    """Changes a model over the first `share` of the run, by the step alone, so that a resumed run continues."""

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share={share} of the run: expected more than 0 and at most 1")
        self.share = share

    def done(self, step: int, steps: int) -> float:
        """The part of the schedule before step `step` (the first is 0) of a run of `steps`, from 0 to 1."""
        return min(step / max(self.share * steps, 1), 1.0)


class _BlendSchedule(Schedule):
    """Sets a blend, before the first step and after each."""

    set: Callable[[nn.Module, float], None]

    def __init__(self, share: float = 0.5, shape: Shape = "linear") -> None:
        super().__init__(share)
        if shape not in ("linear", "cosine"):
            raise ValueError(f'shape={shorten(shape)}: expected "linear" or "cosine"')
        self.shape = shape

    def at(self, step: int, steps: int) -> float:
        """The blend before step `step` (the first is 0) of a run of `steps`."""
        done = self.done(step, steps)
        return done if self.shape == "linear" else (1 - math.cos(math.pi * done)) / 2

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.set(kwargs["model"], self.at(state.global_step, state.max_steps))

    on_step_end = on_train_begin


class BlendSchedule(_BlendSchedule):
    """Trainer callback: brings the scheme in, norms and cap, over the first `share` of the run, by `set_blend`.

    Calibrate the model before, by "moments" or "fit": with fitting gains the model changes less on the way. "fit_qk"
    changes the unpatched model too. `shape` is "linear" or "cosine". In a bare loop, call
    `set_blend(model, schedule.at(step, steps))` before each step.

        >>> schedule = qk.BlendSchedule(share=0.5)
        >>> [schedule.at(step, steps=100) for step in (0, 25, 50, 99)]
        [0.0, 0.5, 1.0, 1.0]
        >>> _ = qk.patch_model(model, "qk_norm_cap")
        >>> trainer.add_callback(schedule)

    Raises ValueError for a `share` that is not in (0, 1] and for an unknown `shape`; when training begins, for all that
    `set_blend` refuses.
    """

    set = staticmethod(set_blend)


class CapSchedule(_BlendSchedule):
    """Trainer callback: lowers the cap to the scheme's over the first `share` of the run, as c/blend, by `set_cap`.

    `shape` is "linear" or "cosine".

        >>> schedule = qk.CapSchedule(share=0.2, shape="cosine")
        >>> [round(schedule.at(step, steps=100), 3) for step in (0, 5, 10, 20)]
        [0.0, 0.146, 0.5, 1.0]

    Raises ValueError for a `share` that is not in (0, 1] and for an unknown `shape`.
    """

    set = staticmethod(set_cap)


def _layers_in_blend(model: nn.Module, blend: float, norms: bool) -> list[QKNormAttention]:
    """The layers of a model in a blend of norms and cap, or of the cap alone; none if the whole scheme stays in.

    A blend under 1 begins here.
    """
    layers = list(require_patched(model).values())
    config: Any = layers[0].config
    if norms and not config.scheme.pre_norm:
        raise ValueError(
            "pre_norm=False removed the norm before attention, so there is no blend to the unpatched model"
        )
    if not 0 <= blend <= 1:
        raise ValueError(f"blend={blend}: expected a number from 0 (as unpatched) to 1 (the whole scheme)")
    if config.qk_norm_blend is None:
        if not norms and config.scheme.softcap is None:
            raise ValueError(f"the scheme has no cap to bring in ({config.scheme}): patch the model with one that has")
        if blend == 1:
            return []
        if config.scheme.learned and dataclasses.replace(config.scheme, **dict.fromkeys(LEARNED)).changes_nothing:
            raise ValueError(
                f"the scheme has no norm and no cap to bring in ({config.scheme}): leave the blend out. A learned "
                "temperature starts where it changes nothing, and learned sinks where they take next to nothing"
            )
        for layer in layers if norms else ():
            start_blend(layer)
        config.qk_norm_blend = {"norms": norms, "softcap": config.scheme.softcap}
    if config.qk_norm_blend["norms"] != norms:
        raise ValueError(
            "set_cap or CapSchedule moves the cap by itself: call set_cap(model, 1) before a blend"
            if norms
            else "this model is in a blend, which moves the cap as well: leave out CapSchedule and set_cap"
        )
    return layers


def _set_cap(layers: list[QKNormAttention], blend: float) -> None:
    """Write the cap for `blend` into the layers and the config; at 1, remove the blend from the config."""
    if not layers:
        return
    config: Any = layers[0].config
    end = config.qk_norm_blend["softcap"]
    own = (config.qk_norm_base or {}).get("attn_logit_softcapping")  # the cap of the unpatched family
    if end is not None:
        done = math.floor(blend * CAP_LEVELS + 1e-9) / CAP_LEVELS  # a cosine's quarters have rounding errors
        inverse = done / end + (0 if own is None else (1 - done) / own)
        cap = end if done == 1 else None if done == 0 else 1 / inverse
        scheme = dataclasses.replace(config.scheme, softcap=cap)
        config.set_scheme(scheme)
        for layer in layers:
            layer.scheme = scheme
    if blend == 1:
        config.qk_norm_blend = None
