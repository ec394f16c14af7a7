"""Short runs of Trainer on data that a tiny model can learn."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments


def counting(rows: int = 64) -> list[dict[str, Tensor]]:
    """Rows that count upwards modulo 32 by a different step each, so that a token follows from those before."""
    starts, steps = torch.arange(rows) % 32, 1 + torch.arange(rows) % 5
    tokens = 3 + (starts[:, None] + steps[:, None] * torch.arange(16)) % 32
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(
    model: nn.Module,
    folder: Path,
    *callbacks: TrainerCallback,
    optimizers: tuple[Any, Any] = (None, None),
    **options: Any,
) -> Trainer:
    settings = {
        "max_steps": 8,
        "per_device_train_batch_size": 16,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }
    arguments = TrainingArguments(folder, **{**settings, **options})
    data = {"train_dataset": counting(), "eval_dataset": counting(16)}
    return Trainer(model, arguments, callbacks=list(callbacks), optimizers=optimizers, **data)


def losses(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


class SaveAt(TrainerCallback):
    """Ends training after a step with a checkpoint, like a killed job, without changing its schedule."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_save = state.global_step >= self.step


class Record(TrainerCallback):
    """Records something of the model before each step."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        self.look, self.seen = look, list[Any]()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(self.look(kwargs["model"]))
