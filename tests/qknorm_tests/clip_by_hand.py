"""QK-Clip's rule computed from all logits, of the queries and keys that each layer has."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_qknorm.families.style import CACHE
from hf_qknorm.model.attention import QKNormAttention, patched_layers
from qknorm_tests.head_rows import ROWS, attention_layers, outputs_first
from qknorm_tests.tables import real


class Recorder:
    """Records the queries, keys and inputs of every call of every layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.heads: dict[str, list[tuple[Tensor, Tensor, float]]] = {}
        self.inputs: dict[str, tuple[Any, Any]] = {}
        for name, layer in patched_layers(model).items():
            layer.observers = (self.noting(name),)
            layer.register_forward_pre_hook(self.keeping(name), with_kwargs=True)

    def noting(self, name: str) -> Any:
        def note(_: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> None:
            self.heads.setdefault(name, []).append((q.detach().double(), k.detach().double(), options["scaling"]))

        return note

    def keeping(self, name: str) -> Any:
        def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.inputs[name] = args, {key: value for key, value in kwargs.items() if key not in (CACHE, "layer_past")}

        return keep


def dense_maxima(layer: QKNormAttention, q: Tensor, k: Tensor, scale: float, batch: dict[str, Any]) -> Tensor:
    """The largest visible logit of each head, from all logits."""
    group = q.shape[1] // k.shape[1]
    logits = scale * q @ k.repeat_interleave(group, 1).transpose(-1, -2)
    row, column = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    seen = (column <= row) & (column > row - (layer.window or 1000))
    tokens = real(batch)
    seen = seen & tokens[:, None, None, :] & tokens[:, None, :, None]
    return logits.masked_fill(~seen, -math.inf).amax((0, 2, 3))


def clip_by_hand(model: PreTrainedModel, model_type: str, maxima: list[Tensor], threshold: float) -> None:
    rows = ROWS[model_type]
    for layer, largest in zip(attention_layers(model, model_type), maxima, strict=True):
        gamma = [min(1.0, threshold / float(m)) for m in largest]
        keys = len(rows["k"][1]) if "k" in rows else len(gamma)
        group = len(gamma) // keys
        shared = [min(gamma[g * group : (g + 1) * group]) for g in range(keys)]
        for part, (where, heads) in rows.items():
            power = {"q": 0.5, "k": 0.5, "uq": 0.5, "uk": 0.5, "qr": 1.0}.get(part, 0.0)
            for p in outputs_first(layer, where):
                for head, outputs in enumerate(heads if power else ()):
                    p[outputs] *= shared[head // (len(heads) // keys)] ** power
