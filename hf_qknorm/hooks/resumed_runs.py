"""The check that a run is resumed with the scheme of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_qknorm.files.log import logger
from hf_qknorm.files.names import CONFIG
from hf_qknorm.files.untrusted import read_json
from hf_qknorm.scheme import Scheme


def check_resumed(
    train: Callable[..., Any], trainer: Any, /, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Train by Trainer's `train`, and refuse to resume a checkpoint whose config.json has another scheme.

    Another cap alone is a warning, and so is a `KneeSchedule` that had not reached its end and is not in this run. The
    checkpoint of an adapter has no config.json: that of its base counts, if it names a folder.
    """
    if resume_from_checkpoint:
        from transformers.trainer import TRAINER_STATE_NAME
        from transformers.trainer_utils import get_last_checkpoint

        last = resume_from_checkpoint is True
        checkpoint = get_last_checkpoint(trainer.args.output_dir) if last else resume_from_checkpoint
        if checkpoint is not None and (config := _config_of(Path(checkpoint))).exists():
            _check_scheme(trainer, Path(checkpoint), config)
        if checkpoint is not None and Path(checkpoint, TRAINER_STATE_NAME).exists():
            _check_schedule(trainer, Path(checkpoint, TRAINER_STATE_NAME))
    return train(trainer, resume_from_checkpoint, *args, **kwargs)


def _config_of(checkpoint: Path) -> Path:
    """The config.json of a checkpoint, or that of the folder which an adapter names as its base; it may not exist."""
    adapter = checkpoint / "adapter_config.json"
    alone = adapter.exists() and not (checkpoint / CONFIG).exists()
    return Path((read_json(adapter).get("base_model_name_or_path") if alone else None) or checkpoint) / CONFIG


def _check_scheme(trainer: Any, checkpoint: Path, config: Path) -> None:
    from hf_qknorm.model.attention import patched_layers

    layers = patched_layers(trainer.model).values()
    own = {(type(x.config).model_type, x.scheme) for x in layers if not x.scheme.changes_nothing}
    stored = {(kind, x) for kind, x in _schemes(read_json(config)) if not x.changes_nothing}
    if own == stored:
        return
    named, found = ("; ".join(sorted(f"{x} in {kind}" for kind, x in held)) or "no scheme" for held in (stored, own))
    text = f"{checkpoint} was trained with {named}, and the model that resumes from it has {found}"
    if own and len({(kind, replace(x, softcap=None)) for kind, x in own | stored}) == len(own) == len(stored):
        logger.warning(f"{text}: the run goes on with another cap")
        return
    raise ValueError(
        f"{text}: patch the model as the checkpoint was, or give the model that AutoModelForCausalLM.from_pretrained "
        "loads from it. To go on with another scheme, start a new run from the checkpoint's weights"
    )


def _check_schedule(trainer: Any, path: Path) -> None:
    """Warn if the run of a trainer_state.json had a KneeSchedule that had not ended, and this run has none."""
    from transformers import TrainerState

    state, name = TrainerState.load_from_json(str(path)), "KneeSchedule"
    entry = state.stateful_callbacks.get(name)
    if entry is None or any(type(callback).__name__ == name for callback in trainer.callback_handler.callbacks):
        return
    own = entry["args"]
    if state.global_step < (own["after"] + own["share"]) * entry["attributes"]["steps"]:
        arguments = ", ".join(f"{key}={value:g}" for key, value in own.items())
        logger.warning(
            f"{path.parent} is of a run with {name}({arguments}), which had not ended, and this run has none: the knee "
            "stays as it is. Add that callback to the Trainer to go on with it"
        )


def _schemes(config: Any) -> Iterator[tuple[Any, Scheme]]:
    """Yield model type and scheme of a config, and of the configs of the models inside."""
    if isinstance(config, dict):
        if config.get("qk_norm") is not None:
            yield config.get("model_type"), Scheme.stored(config["qk_norm"])
        for value in config.values():
            yield from _schemes(value)
