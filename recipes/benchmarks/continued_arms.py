"""The arms of the comparison of continued training: models to start from, and optimisers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import AdamW, Optimizer
from transformers import TrainingArguments

from hf_qknorm import KneeSchedule, MuonClip, QKClip, QuacK, patch_model
from hf_qknorm.small_model import decay_groups

DECAY, BETAS = 0.1, (0.9, 0.95)
TAUS = (0.1, 0.3, 1.0, 3.0)  # QuacK's, of which the tuning runs choose one


@dataclass(frozen=True)
class Start:
    """A scheme on the trained model, None for the model itself, and the arguments of `calibrate`, None for gains 1."""

    scheme: str | None = None
    calibration: dict[str, Any] | None = None


STARTS = {
    "unpatched": Start(),
    "soft_cap": Start("soft_cap"),
    "ones": Start("qk_norm_cap"),
    "knee": Start("qk_norm_cap", {"knee": "auto"}),
    "norms": Start("qk_norm", {"knee": "auto"}),
}
LOWERED = KneeSchedule(0.5)  # to plain norms, by half of the run
OPENED = KneeSchedule(0.25, math.inf, after=0.75)  # in the last quarter; the norms are removed at the end


def adamw(model: Any, rate: float, tau: float) -> Optimizer:
    return AdamW(decay_groups(model, DECAY), lr=rate, betas=BETAS, fused=True)


def quack(model: Any, rate: float, tau: float) -> Optimizer:
    return QuacK(adamw(model, rate, tau), model, tau)


def qk_clip(model: Any, rate: float, tau: float, *, threshold: float) -> Optimizer:
    patch_model(model, "none")  # changes no number, and lets QK-Clip see the logits
    optimizer, clip = adamw(model, rate, tau), QKClip(model, threshold)
    optimizer.register_step_post_hook(lambda *_: clip.step())
    return optimizer


def muon(model: Any, rate: float, tau: float, *, threshold: float | None) -> Optimizer:
    arguments = TrainingArguments(learning_rate=rate, weight_decay=DECAY, adam_beta2=BETAS[1], report_to="none")
    return MuonClip(model, arguments, threshold)


@dataclass(frozen=True)
class Arm:
    """One way to train on: the start, the optimiser, the limit of the gradient's norm, and the knee's schedule."""

    start: str = "unpatched"
    optimizer: Callable[[Any, float, float], Optimizer] = adamw
    clip: float = 1.0
    schedule: KneeSchedule | None = None  # None: the knee stays


ARMS = {
    "unpatched": Arm(),
    "unpatched, clip 0.3": Arm(clip=0.3),
    "soft_cap": Arm("soft_cap"),
    "qk_norm_cap, ones": Arm("ones"),
    "qk_norm_cap, knee": Arm("knee"),
    "qk_norm_cap, knee lowered": Arm("knee", schedule=LOWERED),
    "qk_norm, knee": Arm("norms"),
    "qk_norm, opened and removed": Arm("norms", schedule=OPENED),
    "QK-Clip 30": Arm(optimizer=partial(qk_clip, threshold=30.0)),
    "QK-Clip 100": Arm(optimizer=partial(qk_clip, threshold=100.0)),
    "Muon": Arm(optimizer=partial(muon, threshold=None)),
    "Muon, QK-Clip 100": Arm(optimizer=partial(muon, threshold=100.0)),
    "Muon, knee": Arm("knee", partial(muon, threshold=None)),
    "Muon, knee lowered": Arm("knee", partial(muon, threshold=None), schedule=LOWERED),
    "QuacK": Arm(optimizer=quack),
}
