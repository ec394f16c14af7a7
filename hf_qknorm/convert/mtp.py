"""Layers of multi-token prediction: transformers' classes do not load them, and `generate(use_mtp=True)` does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import modeling_layers


def mtp_tensors(model: Any, folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield name and slice of each tensor of these layers in the folder from which the model was loaded."""
    mtp: Any = getattr(modeling_layers, "MtpModel", None)  # older versions of transformers have none
    if mtp is None or not getattr(model.config.get_text_config(), "num_mtp_layers", None):
        return
    try:
        wanted = mtp.get_mtp_weights_regex(model)
    except (ValueError, TypeError):  # transformers knows no names of such layers in this model
        return
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            names = weights.keys()
            yield from ((name, weights.get_slice(name)) for name in names if wanted.search(name))


def state_with_mtp(model: Any, folder: Path) -> dict[str, Tensor]:
    """The model's state dict, with these layers as they are stored: they stay without a scheme."""
    return model.state_dict() | {name: tensor[...] for name, tensor in mtp_tensors(model, folder)}
