"""Gains by self-distillation: the gains are trained until the patched model predicts what the unpatched one does."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_qknorm.convert.gains import named_norms
from hf_qknorm.files.progress import progress_bar
from hf_qknorm.model.accelerate_hooks import input_device
from hf_qknorm.model.adapters import is_adapter_layer
from hf_qknorm.model.attention import QKNormAttention, as_unpatched, patched_layers
from hf_qknorm.stats.distributed import Batches

HELD_OUT = 2  # batches that the gains are judged on
CHECKS = 10  # how often the gains are judged in a fit
PATIENCE = 5  # checks without progress before a fit stops
GAIN_RATE = 0.1
PROJECTION_RATE = 0.25  # divided by the projection's width, because Adam's steps add up over the columns


@dataclass(frozen=True)
class _Trained:
    """A parameter that a fit trains, its learning rate, and a mask of the entries that may change."""

    parameter: nn.Parameter
    rate: float
    mask: Tensor | float = 1.0


def fit_gains(
    model: Any, batches: Batches, held_out: Batches, *, steps: int = 120, projections: bool = False, seed: int = 0
) -> None:
    """Minimise KL(unpatched ‖ patched) of the next token over gains and biases, by Adam with a cosine decay.

    The teacher is the same model with its norms bypassed, not a copy. With `projections` the weights that lead to
    queries and keys are trained too, at a small rate; the layers keep the original weights in `base_weights`, for the
    teacher. Weights and optimiser state are fp32 at least, whatever the model's dtype. The best weights on the first
    two batches of `held_out` are kept, the start included. The fit stops early without progress on these.
    """
    held_out = held_out[:HELD_OUT]
    order = random.Random(seed)
    trained = [_Trained(p, GAIN_RATE) for norm in named_norms(model).values() for p in norm.parameters()]
    if projections:
        for layer in patched_layers(model).values():
            weights = _query_key_weights(layer)
            layer.base_weights = tuple((t.parameter, t.parameter.detach().clone()) for t in weights)
            trained += weights
    if not trained:  # a scheme with a cap alone, or with norms without gains
        return
    dtypes = [torch.promote_types(t.parameter.dtype, torch.float32) for t in trained]
    masters = [t.parameter.detach().to(dtype, copy=True) for t, dtype in zip(trained, dtypes, strict=True)]
    with _gradients_of(model, [t.parameter for t in trained]):
        groups = [{"params": [w], "lr": t.rate, "rate": t.rate} for t, w in zip(trained, masters, strict=True)]
        optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
        best, kept, stale = divergence(model, held_out), [w.clone() for w in masters], 0
        bar = progress_bar(range(steps), desc="fit", unit="step")
        queue: list[dict[str, Tensor]] = []
        for step in bar:
            queue = queue or order.sample(batches, len(batches))
            for group in optimizer.param_groups:
                group["lr"] = group["rate"] * 0.5 * (1 + math.cos(math.pi * step / steps))
            torch.autograd.backward(_batch_divergence(model, queue.pop()))
            _step(optimizer, trained, masters)
            if (step + 1) % max(steps // CHECKS, 1) and step + 1 != steps:
                continue
            now = divergence(model, held_out)
            bar.set_postfix(kl=f"{now:.4f}")
            stale += 1
            if now < best:
                best, kept, stale = now, [w.clone() for w in masters], 0
            if stale == PATIENCE:
                break
        for t, value in zip(trained, kept, strict=True):
            t.parameter.data.copy_(value)


@torch.no_grad()
def divergence(model: Any, batches: Batches) -> float:
    """Mean KL(unpatched ‖ patched) of the next-token distributions, in nats per token."""
    return sum(float(_batch_divergence(model, batch)) for batch in batches) / len(batches)


def _batch_divergence(model: Any, batch: dict[str, Tensor]) -> Tensor:
    inputs = {key: value.to(input_device(model)) for key, value in batch.items()}
    with torch.no_grad(), as_unpatched(model):
        target = F.log_softmax(model(**inputs, use_cache=False).logits.float(), dim=-1)
    predicted = F.log_softmax(model(**inputs, use_cache=False).logits.float(), dim=-1)
    tokens = F.kl_div(predicted, target, log_target=True, reduction="none").sum(-1)
    if "attention_mask" in inputs:
        tokens = tokens[inputs["attention_mask"].to(tokens.device).bool()]
    return tokens.mean()


def check_movable(model: nn.Module, reason: str) -> None:
    """Raise ValueError if projections can't change permanently, or queries and keys have none of their own.

    They can't if they are offloaded, quantised or under adapters.
    """
    if any(layer.family.latent for layer in patched_layers(model).values()):
        raise ValueError(
            f"{reason} moves the projections to queries and keys, and this model projects keys and values from one "
            'latent: use method="moments" or "fit", which leave the weights as they are'
        )
    parts = [part for layer in patched_layers(model).values() for part in _projections(layer)]
    if any(map(is_adapter_layer, parts)):
        raise ValueError(
            f"{reason} moves weights, and some are under adapters, which do not save them: calibrate before you add "
            "adapters"
        )
    parameters = [p for part in parts for p in part.parameters()]
    if any(p.is_meta for p in parameters):
        raise ValueError(f'{reason} moves weights, and some are offloaded: use method="fit", or a larger machine')
    if not all(p.is_floating_point() for p in parameters):
        raise ValueError(f"{reason} moves weights, and some are quantised: calibrate in full precision, then quantise")


def _projections(layer: QKNormAttention) -> list[nn.Module]:
    return [layer.get_submodule(part) for part in layer.family.style.weights]


def _query_key_weights(layer: QKNormAttention) -> list[_Trained]:
    """The weights and biases that queries and keys depend on, with masks: one weight may lead to values too."""
    parameters = [p for part in _projections(layer) for p in part.parameters()]
    probe = torch.ones(1, 1, layer.config.hidden_size, device=parameters[0].device, dtype=parameters[0].dtype)
    with torch.enable_grad(), _gradients_of(layer, parameters):
        q, k, *_ = layer.family.style.project(layer, probe)
        grads = torch.autograd.grad(q.sum() + k.sum(), parameters, allow_unused=True)
    rate = PROJECTION_RATE / layer.config.hidden_size
    return [_Trained(p, rate, g != 0) for p, g in zip(parameters, grads, strict=True) if g is not None and g.any()]


@contextmanager
def _gradients_of(module: nn.Module, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Let only `parameters` of a module take gradients for the duration."""
    flags = [(p, p.requires_grad) for p in module.parameters()]
    try:
        module.requires_grad_(False)
        for p in parameters:
            p.requires_grad_(True)
        yield
    finally:
        for p in parameters:
            p.grad = None
        for p, flag in flags:
            p.requires_grad_(flag)


@torch.no_grad()
def _step(optimizer: torch.optim.Optimizer, trained: list[_Trained], masters: list[Tensor]) -> None:
    """Step the master weights by the parameters' gradients, and round them into the parameters."""
    for t, w in zip(trained, masters, strict=True):
        grad = t.parameter.grad
        if grad is None:  # of unused norms: the cross-attention of a decoder alone
            continue
        w.grad = (grad * t.mask).to(w.dtype)
        t.parameter.grad = None
    optimizer.step()
    for t, w in zip(trained, masters, strict=True):
        t.parameter.data.copy_(w)
