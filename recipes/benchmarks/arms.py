"""The variants that the sweep of learning rates and the table of costs compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from hf_qknorm import QKClip, QuacK


def keep(model: Any, optimizer: Optimizer) -> Optimizer:
    return optimizer


def quack(model: Any, optimizer: Optimizer) -> Optimizer:
    return QuacK(optimizer, model)


def qk_clip(model: Any, optimizer: Optimizer) -> Optimizer:
    clip = QKClip(model)
    optimizer.register_step_post_hook(lambda *_: clip.step())
    return optimizer


@dataclass(frozen=True)
class Arm:
    """One way to train: a scheme, and a wrapper around the optimizer."""

    scheme: str = "none"
    around: Callable[[Any, Optimizer], Optimizer] = keep
    paper: float | None = None  # the largest stable rate that Rybakov et al. tell


ARMS = {
    "baseline": Arm(paper=6e-3),
    "soft_cap": Arm("soft_cap", paper=40e-3),
    "qk_norm": Arm("qk_norm", paper=40e-3),
    "qk_norm_cap": Arm("qk_norm_cap", paper=60e-3),
    "qkv_norm": Arm("qkv_norm", paper=60e-3),
    "QuacK": Arm(around=quack),
    "QK-clip": Arm(around=qk_clip),
}
