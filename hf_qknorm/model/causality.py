"""A check that patching kept a model causal: two forward passes over tokens that differ in the last one."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_qknorm.model.config_checks import describe_error

logger = logging.getLogger("hf_qknorm")

MAX_PARAMETERS = 50_000_000  # below, two forward passes over eight tokens take milliseconds


def check_causality(model: PreTrainedModel, before: bool | Exception | None) -> None:
    """Raise RuntimeError if patching or its backend broke a model's forward, or made it non-causal.

    `before` is the `causality` of the unpatched model. Warns if causality can't be checked: the unpatched model failed
    too, or the backend does not run here.
    """
    if before is None:
        return
    unchecked = "patched, but whether it is causal is not checked:"
    if isinstance(before, Exception):
        logger.warning("%s its forward failed here before it was patched too (%s)", unchecked, describe_error(before))
        return
    after = causality(model)
    backend = model.config._attn_implementation
    if after is False and (before or _works_eagerly(model, backend)):  # else the model itself is not causal
        raise RuntimeError(
            f"with attn_implementation={backend!r} a later token changes earlier outputs: causality is lost. Was the "
            "backend registered without a mask function (AttentionMaskInterface)?"
        )
    if isinstance(after, Exception):
        if not _works_eagerly(model, backend):
            raise RuntimeError(
                f"the patched model's forward fails, which the unpatched model's does not: {describe_error(after)}"
            ) from after
        logger.warning("%s attn_implementation=%r does not run here (%s)", unchecked, backend, describe_error(after))


def _works_eagerly(model: PreTrainedModel, backend: str) -> bool:
    """Whether the patched model is causal with eager attention instead of its backend."""
    model.set_attn_implementation("hf_qknorm_eager")
    try:
        return causality(model) is True
    finally:
        model.set_attn_implementation(backend)


def causality(model: PreTrainedModel) -> bool | Exception | None:
    """Return whether the model is causal, the exception that its forward raises, or None if the check is costly."""
    try:
        return is_causal(model) if can_check_causality(model) else None
    except Exception as error:
        return error


def can_check_causality(model: PreTrainedModel) -> bool:
    """Whether the check is cheap and possible: few parameters, all in memory, and at least two tokens."""
    parameters = list(model.parameters())
    small = sum(p.numel() for p in parameters) <= MAX_PARAMETERS and not any(p.is_meta for p in parameters)
    embeddings: Any = model.get_input_embeddings()
    return small and getattr(embeddings, "num_embeddings", 0) > 1


@torch.no_grad()
def is_causal(model: PreTrainedModel) -> bool:
    """Whether earlier outputs stay the same when the last of eight tokens changes. Errors of the model pass through."""
    embeddings: Any = model.get_input_embeddings()
    vocabulary = embeddings.num_embeddings
    tokens = torch.arange(8, device=embeddings.weight.device)[None] % vocabulary
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % vocabulary
    with _state_restored(model):
        first, second = (model.base_model(input_ids=x, use_cache=False)[0][:, :-1].float() for x in (tokens, changed))
    tolerance = 1e-5 if model.dtype in (torch.float32, torch.float64) else 1e-2  # experts may round differently
    largest = float(first.where(first.isfinite(), 0.0).abs().max())
    return first.allclose(second, rtol=0.0, atol=tolerance * largest, equal_nan=True)  # NaN in both is no contradiction


@contextmanager
def _state_restored(model: PreTrainedModel) -> Iterator[None]:
    """Run in eval mode without PyTorch's hooks; restore modes, hooks, attributes, buffers and random states after."""
    modules = list(model.modules())
    attributes = [{**vars(module), "_buffers": module._buffers.copy()} for module in modules]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    cards = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices=cards):
        try:
            for module in modules:
                module.training = False
                module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
            yield
        finally:
            for module, own in zip(modules, attributes, strict=True):
                vars(module).clear()
                vars(module).update(own)
            for buffer, value in values:
                buffer.copy_(value)
