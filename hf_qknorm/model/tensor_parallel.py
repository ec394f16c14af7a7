"""Tensor parallelism: entries for the new norms in a model's plan."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from hf_qknorm.model.attention import QKNormAttention, head_norms, patched_layers


def plan_norms(model: nn.Module) -> None:
    """Add the norms to the tensor-parallel plans of `model` and of the models inside it, in place.

    If the projections are sharded, each rank norms its own heads. Gains per head are sharded with the heads. Gains that
    all heads share are replicated, and their gradient is summed over the ranks.
    """
    for module in model.modules():
        plan: dict[str, str] = (getattr(module, "_tp_plan", None) or {}) if isinstance(module, PreTrainedModel) else {}
        layers = patched_layers(module) if plan else {}
        entries = {key: style for path, layer in layers.items() for key, style in _entries(path, layer, plan)}
        if entries:
            vars(module).update(qk_norm_base_tp_plan=plan, _tp_plan={**plan, **entries})


def unplan_norms(model: nn.Module) -> None:
    """Undo `plan_norms`."""
    for module in model.modules():
        if (plan := vars(module).pop("qk_norm_base_tp_plan", None)) is not None:
            vars(module)["_tp_plan"] = plan


def _entries(path: str, layer: QKNormAttention, plan: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the entries for the norms of the layer at `path`; wildcards replace layer numbers."""
    path = re.sub(r"(?<=\.)\d+(?=\.)", "*", path)
    if not any(plan.get(f"{path}.{weight}") == "colwise" for weight in layer.family.style.weights):
        return  # each rank has all heads
    for name, norm in head_norms(layer).items():
        for kind, parameter in norm.named_parameters():
            if parameter.ndim == 2 and len(parameter) > 1:  # a key that all heads share is replicated
                yield f"{path}.{name}.{kind}", "colwise"
            else:
                yield f"{path}.{name}", "replicated_with_grad_allreduce"
