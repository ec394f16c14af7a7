"""The trainings of `long_context.py`: the model that copies, by arm and seed, extended or at its own length."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from long_context_arms import Size, measure
from long_context_page import SCALED
from long_context_tasks import Draw, Stage, mixed_rows, train
from run_log import Row
from torch import Tensor

EXTENDED, SAME = "extended", "at the trained length"
STAGES = {
    "full": {EXTENDED: Stage(120, 1, 1024, rate=3e-4), SAME: Stage(120, 4, 256, rate=3e-4)},
    "quick": {EXTENDED: Stage(2, 1, 128, rate=3e-4), SAME: Stage(2, 2, 64, rate=3e-4)},
}
TRAINED = {
    EXTENDED: ("unpatched", "knee 0", "found knee"),
    SAME: ("unpatched", "knee 0"),
}
ROWS = 24


def wanted_trainings(model: str, size: str, seeds: int) -> list[Row]:
    """The settings of all trainings, seed by seed."""
    wanted = []
    for seed in range(seeds):
        for name, stage in STAGES[size].items():
            arms = [arm + scaled for arm in TRAINED[name] for scaled in ("", SCALED)]
            shared = {"part": "training", "model": model, "size": size, "stage": name, "seed": seed, **asdict(stage)}
            wanted += [{**shared, "arm": arm} for arm in arms]
    return wanted


def train_on(model: Any, seen: Tensor, held_out: Tensor, settings: Row, size: Size) -> Row:
    """Train the model and measure it."""
    torch.manual_seed(settings["seed"])
    stage = STAGES[settings["size"]][settings["stage"]]
    losses = list(train(model, Draw(seen, 100 + settings["seed"]), stage, mixed_rows))
    return {"training": round(sum(losses[-20:]) / len(losses[-20:]), 4), **measure(model, held_out, size, ROWS)}
