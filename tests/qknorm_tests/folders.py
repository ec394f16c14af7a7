"""Folders of checkpoints: saved, loaded, compared, and changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_qknorm.small_model import byte_tokenizer


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def save_with_tokenizer(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """Save a model, of 257 tokens at least, and the demo's tokenizer of bytes."""
    byte_tokenizer().save_pretrained(folder)
    return save(model, folder, **options)


def loaded(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="hf_qknorm")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors in a checkpoint's single file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change the settings in a checkpoint's config.json; return the folder."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def configure(folder: Path, **settings: Any) -> None:
    """Change settings of a checkpoint's config; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
