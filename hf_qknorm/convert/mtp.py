"""Layers of multi-token prediction: transformers' classes do not load them, and `generate(use_mtp=True)` does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor


def mtp_tensors(model: Any, folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield name and slice of each tensor of these layers in the folder from which the model was loaded."""
    config = model.config.get_text_config()
    if not getattr(config, "num_mtp_layers", None):
        return
    # A class names the layers of all sizes: one with the number of a layer that this model has is another size's.
    found = {pattern: re.search(r"\.(\d+)", pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()}
    wanted = [x for x, number in found.items() if number is None or int(number[1]) >= config.num_hidden_layers]
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118  # a handle, not a mapping
                if any(re.search(pattern, name) for pattern in wanted):
                    yield name, weights.get_slice(name)


def state_with_mtp(model: Any, folder: Path) -> dict[str, Tensor]:
    """The model's state dict, with these layers as they are stored: they stay without a scheme."""
    return model.state_dict() | {name: tensor[...] for name, tensor in mtp_tensors(model, folder)}
