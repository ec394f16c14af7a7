"""The check that a run is resumed with the scheme of its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hf_qknorm.files.log import logger
from hf_qknorm.files.names import CONFIG
from hf_qknorm.files.untrusted import read_json
from hf_qknorm.model.in_memory import InMemoryName
from hf_qknorm.scheme import Scheme, in_words


def check_resumed(
    train: Callable[..., Any], trainer: Any, /, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Train by Trainer's `train`, and refuse to resume a checkpoint of another scheme.

    The scheme is that of its config.json, or that of an adapter's base model. Another cap alone is a warning, and so is
    a `KneeSchedule` that had not reached its end and is not in this run.
    """
    if resume_from_checkpoint:
        from transformers.trainer_utils import get_last_checkpoint

        last = resume_from_checkpoint is True
        checkpoint = get_last_checkpoint(trainer.args.output_dir) if last else resume_from_checkpoint
        if checkpoint is not None:
            _check_scheme(trainer, Path(checkpoint))
            _check_schedule(trainer, Path(checkpoint))
    return train(trainer, resume_from_checkpoint, *args, **kwargs)


def _check_scheme(trainer: Any, checkpoint: Path) -> None:
    from hf_qknorm.model.attention import patched_layers

    own = in_words((type(x.config).model_type, x.scheme) for x in patched_layers(trainer.model).values())
    stored = _stored(trainer.model, checkpoint) or own
    text = f"{checkpoint} was trained with {stored}, and the model that resumes from it has {own}"
    if len({re.sub(r"(, )?softcap=[^,; ]+", "", schemes) for schemes in (stored, own)}) > 1:
        raise ValueError(
            f"{text}: patch the model as that of the checkpoint, or load that model from its folder. To go on with "
            "another scheme, start a new run from the checkpoint's weights"
        )
    if stored != own:
        logger.warning(f"{text}: the run goes on with another cap")


def _stored(model: Any, checkpoint: Path) -> str | None:
    """The schemes of a checkpoint, or of its adapter's base model, in words; None where they are not known."""
    if not (checkpoint / CONFIG).exists() and (adapter := checkpoint / "adapter_config.json").exists():
        base = str(read_json(adapter).get("base_model_name_or_path") or checkpoint)
        name = model.name_or_path  # a plain one is that of the folder where the patched model was saved
        if isinstance(name, InMemoryName) and base == name and hasattr(model, "qk_norm_base_marked"):
            return in_words(())
        if found := re.search(r" \(changed in memory, (.+), not saved: ", base):  # as an `InMemoryName` is stored
            return found[1]
        checkpoint = Path(base)
    return in_words(_schemes(read_json(checkpoint / CONFIG))) if (checkpoint / CONFIG).exists() else None


def _check_schedule(trainer: Any, checkpoint: Path) -> None:
    """Warn if the run of a checkpoint had a KneeSchedule that had not ended, and this run has none."""
    from transformers.trainer import TRAINER_STATE_NAME, TrainerState

    path, name = checkpoint / TRAINER_STATE_NAME, "KneeSchedule"
    state = TrainerState.load_from_json(str(path)) if path.exists() else TrainerState()
    entry = state.stateful_callbacks.get(name)
    if entry is None or any(type(callback).__name__ == name for callback in trainer.callback_handler.callbacks):
        return
    own = entry["args"]
    if state.global_step < (own["after"] + own["share"]) * entry["attributes"]["steps"]:
        arguments = ", ".join(f"{key}={value:g}" for key, value in own.items())
        logger.warning(
            f"{checkpoint} is of a run with {name}({arguments}), which had not ended, and this run has none: the knee "
            "stays as it is. Add that callback to the Trainer to go on with it"
        )


def _schemes(config: Any) -> Iterator[tuple[Any, Scheme]]:
    """Yield model type and scheme of a config, and of the configs of the models inside."""
    if isinstance(config, dict):
        if config.get("qk_norm") is not None:
            yield config.get("model_type"), Scheme.stored(config["qk_norm"])
        for value in config.values():
            yield from _schemes(value)
