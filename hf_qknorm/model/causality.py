"""A probe of causality: whether a changed last token moves earlier outputs, on a model that stays as it was."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

MAX_PARAMETERS = 50_000_000  # below, two forward passes over eight tokens take milliseconds


def can_check_causality(model: PreTrainedModel) -> bool:
    """Whether a probe is cheap and possible: few parameters, all in memory, and tokens to change."""
    parameters = list(model.parameters())
    small = sum(p.numel() for p in parameters) <= MAX_PARAMETERS and not any(p.is_meta for p in parameters)
    embeddings: Any = model.get_input_embeddings()
    return small and getattr(embeddings, "num_embeddings", 0) > 1


@torch.no_grad()
def is_causal(model: PreTrainedModel) -> bool:
    """Whether earlier outputs stay where they are when the last of eight tokens changes. Raises what the model does."""
    embeddings: Any = model.get_input_embeddings()
    vocabulary = embeddings.num_embeddings
    tokens = torch.arange(8, device=embeddings.weight.device)[None] % vocabulary
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % vocabulary
    with _undisturbed(model):
        first, second = (model.base_model(input_ids=x, use_cache=False)[0][:, :-1].float() for x in (tokens, changed))
    tolerance = 1e-5 if model.dtype in (torch.float32, torch.float64) else 1e-2  # experts may round differently
    finite = first.isfinite()  # a model may give NaN by itself, which is no matter of causality
    if not torch.equal(finite, second.isfinite()):
        return False
    first, second = first.where(finite, 0.0), second.where(finite, 0.0)
    return bool((first - second).abs().max() <= tolerance * first.abs().max())


@contextmanager
def _undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """Eval mode, without PyTorch's hooks; then modes, hooks, attributes, buffers and seeds are as they were."""
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    cards = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices=cards):
        try:
            for module in modules:
                module.training = False
                module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
            yield
        finally:
            for module, own, tensors in zip(modules, attributes, buffers, strict=True):
                vars(module).clear()
                vars(module).update(own)
                module._buffers.clear()
                module._buffers.update(tensors)
            for buffer, value in values:
                buffer.copy_(value)
