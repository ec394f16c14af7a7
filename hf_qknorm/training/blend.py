"""Schedules that bring the scheme in step by step, from a model with the outputs of the unpatched one.

With a blend b, each norm gives x + b·(y − x), and the cap c acts as c/b: 0 is the unpatched layer, 1 is the layer with
the scheme. The cap moves in quarters of b, because torch.compile compiles a program for each value of the cap.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from itertools import chain
from typing import Any, Literal

from torch import nn

from hf_qknorm.files.formatting import shorten
from hf_qknorm.model.adapters import is_adapted
from hf_qknorm.model.attention import QKNormAttention, every_norm, norm_copies, require_patched
from hf_qknorm.model.install import end_blend, start_blend
from hf_qknorm.training.schedule import Schedule

logger = logging.getLogger(__name__)

CAP_LEVELS = 4
Shape = Literal["linear", "cosine"]


def set_blend(model: nn.Module, blend: float) -> None:
    """Set the share of a patched model's scheme that acts, norms and cap: 0 (as unpatched) to 1 (the whole scheme).

    The blend is a buffer of the norms, which checkpoints hold. 1 ends the blend: the buffers are removed from the
    model, its config and later checkpoints.

        >>> ids = torch.arange(8)[None]
        >>> before = model(ids).logits
        >>> qk.set_blend(qk.patch_model(model, "qk_norm"), 0.0)
        >>> torch.equal(model(ids).logits, before)
        True

    Raises ValueError for a model that is not patched, a blend outside 0 to 1, a cap that `set_cap` moves, a scheme with
    pre_norm=False, which removed the norm before attention, and below 1 for one with a scale and no norm of queries or
    keys.
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


class _BlendSchedule(Schedule):
    """Sets a blend, before the first step and after each."""

    target = 1.0
    settings = ("share", "shape", "steps")

    def __init__(self, share: float = 0.5, shape: Shape = "linear", steps: int | None = None) -> None:
        super().__init__(share, steps)
        if shape not in ("linear", "cosine"):
            raise ValueError(f'shape={shorten(shape)}: expected "linear" or "cosine"')
        self.shape = shape

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if state.is_world_process_zero and is_adapted(kwargs["model"]):
            logger.warning(
                "an adapter's checkpoint does not hold the %s of the base model: until it is 1, load a checkpoint by "
                "resuming this run, and not by PeftModel.from_pretrained",
                self.noun,
            )

    def at(self, step: int, steps: int, start: float = 0.0) -> float:
        """The blend before step `step` (the first is 0) of a run of `steps` that begins with the blend `start`."""
        return self.path(self.done(step, steps), start)

    def path(self, done: float, start: float) -> float:
        return start + (1 - start) * (done if self.shape == "linear" else (1 - math.cos(math.pi * done)) / 2)

    def first(self, model: nn.Module) -> float:
        return _blend_of(model) or 0.0

    def restore(self, model: nn.Module, found: Mapping[str, Any], done: float) -> float:
        known = (found.get("value"), self.loaded(model), _blend_of(model), 1.0 if done == 1 else None)
        blend = next((blend for blend in known if blend is not None), None)
        if blend is None:
            name, call = type(self).__name__, self.put.__name__
            raise ValueError(
                f"the checkpoint holds no state of a {name}, and neither its weights nor the model tell the "
                f"{self.noun}: leave {name} out if it had ended. Else load the model from the checkpoint by "
                f"from_pretrained, or call {call}(model, b) with the {self.noun} b of the checkpoint, before resuming"
            )
        self.put(model, blend)
        return blend

    def loaded(self, model: nn.Module) -> float | None:
        """The blend of the weights that `load_state_dict` gave the model, None where they do not tell it."""
        return None

    def present(self, model: nn.Module) -> float:
        assert self.value is not None
        return 1.0 if _config(model).qk_norm_blend is None else self.value


class BlendSchedule(_BlendSchedule):
    """Trainer callback: brings the scheme in, norms and cap, over the first `share` of the run, by `set_blend`.

    Calibrate the model before, by "moments": with fitting gains the model changes less on the way. `shape` is "linear"
    or "cosine". In a bare loop, call `set_blend(model, schedule.at(step, steps))` before each step.

    The blend starts at 0, or at the present one of a model that is in a blend. `steps` gives the length in steps, in
    place of `share`. Checkpoints hold the length: a run that is resumed with another `max_steps` keeps it. Resumed with
    other arguments than before, the schedule begins again at the present blend, over `steps` or a `share` of the steps
    left. The blend never falls. The log says what a resumed schedule does.

        >>> schedule = qk.BlendSchedule(share=0.5)
        >>> [schedule.at(step, steps=100) for step in (0, 25, 50, 99)]
        [0.0, 0.5, 1.0, 1.0]
        >>> _ = qk.patch_model(model, "qk_norm_cap")
        >>> trainer.add_callback(schedule)

    Raises ValueError for a `share` that is not in (0, 1], `steps` below 1 and an unknown `shape`; when training begins,
    for a second BlendSchedule, `load_best_model_at_end`, and where `set_blend` does.
    """

    noun = "blend"
    put = staticmethod(set_blend)

    def loaded(self, model: nn.Module) -> float | None:
        blends = [norm.loaded_blend for norm in every_norm(model)]
        return None if None in blends else next(iter(blends), None)


class CapSchedule(_BlendSchedule):
    """Trainer callback: lowers the cap to the scheme's over the first `share` of the run, as c/blend, by `set_cap`.

    `shape` is "linear" or "cosine". `steps` and resumed runs are as in `BlendSchedule`.

        >>> schedule = qk.CapSchedule(share=0.2, shape="cosine")
        >>> [round(schedule.at(step, steps=100), 3) for step in (0, 5, 10, 20)]
        [0.0, 0.146, 0.5, 1.0]

    Raises ValueError for a `share` that is not in (0, 1], `steps` below 1 and an unknown `shape`; when training begins,
    for a second CapSchedule, `load_best_model_at_end`, and where `set_cap` does.
    """

    noun = "cap's blend"
    put = staticmethod(set_cap)


def _config(model: nn.Module) -> Any:
    return next(iter(require_patched(model).values())).config


def _blend_of(model: nn.Module) -> float | None:
    """The blend of a patched model, None outside of one. Without norms it is read off the cap, in quarters."""
    config = _config(model)
    if config.qk_norm_blend is None:
        return None
    if (blend := next((norm.blend for norm in every_norm(model) if norm.blend is not None), None)) is not None:
        return float(blend)
    caps = (_own_cap(config), config.scheme.softcap, config.qk_norm_blend["softcap"])
    own, present, end = (1 / cap if cap else 0.0 for cap in caps)
    if not present or own == end:
        return 0.0
    return round((present - own) / (end - own) * CAP_LEVELS) / CAP_LEVELS


def _own_cap(config: Any) -> float | None:
    """The cap of the unpatched family."""
    return (config.qk_norm_base or {}).get("attn_logit_softcapping")


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
    own = _own_cap(config)
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
