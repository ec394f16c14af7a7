"""Tensor parallelism: entries for the new norms in a model's plan."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_qknorm.model.attention import head_norms, patched_layers


def plan_norms(model: nn.Module) -> None:
    """Add the norms to the tensor-parallel plans of `model` and of the models inside it, in place.

    If the projections are sharded, each rank norms its own heads. Gains per head are sharded with the heads. Gains that
    all heads share are replicated, and their gradient is summed over the ranks.
    """
    for module, entries in _entries(model):
        module._tp_plan = {**module._tp_plan, **entries}


def unplan_norms(model: nn.Module) -> None:
    """Undo `plan_norms`, before the norms are removed."""
    for module, entries in _entries(model):
        module._tp_plan = {key: style for key, style in module._tp_plan.items() if key not in entries}


def _entries(model: nn.Module) -> Iterator[tuple[Any, dict[str, str]]]:
    """Yield the models that have a plan with the entries for their norms; wildcards replace layer numbers."""
    for module in model.modules():
        plan: dict[str, str] = (getattr(module, "_tp_plan", None) or {}) if isinstance(module, PreTrainedModel) else {}
        entries: dict[str, str] = {}
        for path, layer in patched_layers(module).items() if plan else ():
            path = re.sub(r"(?<=\.)\d+(?=\.)", "*", path)
            if all(plan.get(f"{path}.{weight}") != "colwise" for weight in layer.family.style.weights):
                continue  # each rank has all heads
            for name, norm in head_norms(layer).items():
                for kind, parameter in norm.named_parameters():
                    by_head = parameter.ndim == 2 and len(parameter) > 1  # a key that all heads share is replicated
                    key = f"{path}.{name}.{kind}" if by_head else f"{path}.{name}"
                    entries[key] = "colwise" if by_head else "replicated_with_grad_allreduce"
        if plan:
            yield module, entries
