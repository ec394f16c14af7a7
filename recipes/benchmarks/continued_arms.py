"""The arms of the comparison of continued training: models to start from, and optimisers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import AdamW, Optimizer
from transformers import TrainingArguments

from hf_qknorm import MuonClip, QKClip, QuacK, patch_model
from hf_qknorm.demo.training import decay_groups

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
}


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
    lowered: float = 0.0  # the share of the run in which the knee falls to 0; 0: it stays


ARMS = {
    "unpatched": Arm(),
    "unpatched, clip 0.3": Arm(clip=0.3),
    "soft_cap": Arm("soft_cap"),
    "qk_norm_cap, ones": Arm("ones"),
    "qk_norm_cap, knee": Arm("knee"),
    "qk_norm_cap, knee lowered": Arm("knee", lowered=0.5),
    "QK-Clip 30": Arm(optimizer=partial(qk_clip, threshold=30.0)),
    "QK-Clip 100": Arm(optimizer=partial(qk_clip, threshold=100.0)),
    "Muon": Arm(optimizer=partial(muon, threshold=None)),
    "Muon, QK-Clip 100": Arm(optimizer=partial(muon, threshold=100.0)),
    "Muon, knee lowered": Arm("knee", partial(muon, threshold=None), lowered=0.5),
    "QuacK": Arm(optimizer=quack),
}
