"""What the attention logits of a patched model look like, layer by layer and head by head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_qknorm import functions
from hf_qknorm.attention import QKNormAttention, patched_layers
from hf_qknorm.ops import tiled


@dataclass
class LogitStatistics:
    """Per head `[H]`, over all forward passes watched: the largest |logit| before the cap, and entropies in nats."""

    max_logit: Tensor
    entropies: list[Tensor] = field(default_factory=list)

    @property
    def entropy(self) -> Tensor:
        """The mean attention entropy per head, each forward pass counting the same."""
        return torch.stack(self.entropies).mean(0)


@contextmanager
def logit_statistics(model: Any) -> Iterator[dict[str, LogitStatistics]]:
    """Watch the logits of every forward pass of a patched model within: layer name → `LogitStatistics`.

    The largest logit is that of scale·q·k where the mask lets it through. No T×S tensor is formed. An unpatched model
    can be watched through the scheme "none", which changes nothing.

    Raises ValueError for a model that is not patched.
    """
    layers = patched_layers(model)
    if not layers:
        raise ValueError(f'{type(model).__name__} is not patched: patch_model(model, "none") makes it watchable')
    collected: dict[str, LogitStatistics] = {}
    names = {layer: name for name, layer in layers.items()}

    @torch.no_grad()
    def observe(layer: QKNormAttention, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> None:
        boundaries = options.get("cu_seq_lens_q")
        seen = functions.structure(
            layer, q, k, v, mask, options["sliding_window"], options.get("is_causal"), boundaries
        )
        largest, entropy = tiled.statistics(
            q,
            seen.key,
            seen.mask,
            None,
            tiled.Options(options["scaling"], options.get("softcap"), seen.causal, seen.window),
        )
        entry = collected.setdefault(names[layer], LogitStatistics(torch.zeros_like(largest)))
        entry.max_logit = torch.maximum(entry.max_logit, largest)
        entry.entropies.append(entropy)

    try:
        for layer in layers.values():
            layer.observer = observe
        yield collected
    finally:
        for layer in layers.values():
            del layer.observer
