"""Gains by self-distillation: the patched model learns, through its gains alone, to predict as it did unpatched."""

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
from tqdm.auto import tqdm

from hf_qknorm.model.accelerate_hooks import input_device
from hf_qknorm.model.adapters import is_adapter_layer
from hf_qknorm.model.attention import QKNormAttention, as_unpatched, head_norms, patched_layers

HELD_OUT = 2  # batches that judge the gains
CHECKS = 10  # how often in a fit the held-out batches are asked
PATIENCE = 5  # checks without progress before it stops
GAIN_RATE = 0.1
PROJECTION_RATE = 0.25  # over the projection's width: Adam's steps add up over the columns


@dataclass(frozen=True)
class _Fitted:
    """A parameter that a fit moves: by which rate, and which of its entries (all where `mask` is None)."""

    parameter: nn.Parameter
    rate: float
    mask: Tensor | None = None


def fit_gains(
    model: Any,
    batches: list[dict[str, Tensor]],
    held_out: list[dict[str, Tensor]],
    *,
    steps: int = 120,
    projections: bool = False,
    seed: int = 0,
) -> None:
    """Minimise KL(unpatched ‖ patched) of the next token over gains and biases, by Adam with a cosine decay.

    The teacher is the same model with its norms bypassed: no second copy. With `projections` the weights that lead to
    queries and keys move too, at a small rate; what they were is kept in the layers' `base_weights` for the teacher.
    Weights and optimiser state are fp32 at least, whatever the model's dtype. Kept is what did best on the first two of
    the batches `held_out`, the start included; it stops early when those see no progress.
    """
    held_out = held_out[:HELD_OUT]
    order = random.Random(seed)
    fitted = [_Fitted(p, GAIN_RATE) for p in _gains(model)]
    if projections:
        for layer in patched_layers(model).values():
            moved = _query_key_weights(layer)
            layer.base_weights = tuple((f.parameter, f.parameter.detach().clone()) for f in moved)
            fitted += moved
    if not fitted:  # a cap alone, or norms without gains
        return
    with _alone(model, fitted) as wide:
        groups = [{"params": [w], "lr": f.rate, "rate": f.rate} for f, w in zip(fitted, wide, strict=True)]
        optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
        best, kept, stale = divergence(model, held_out), [w.clone() for w in wide], 0
        bar = tqdm(range(steps), desc="fit", unit="step", leave=False)
        queue: list[dict[str, Tensor]] = []
        for step in bar:
            queue = queue or order.sample(batches, len(batches))
            for group in optimizer.param_groups:
                group["lr"] = group["rate"] * 0.5 * (1 + math.cos(math.pi * step / steps))
            torch.autograd.backward(_divergence(model, queue.pop()))
            _step(optimizer, fitted, wide)
            if (step + 1) % max(steps // CHECKS, 1) and step + 1 != steps:
                continue
            now = divergence(model, held_out)
            bar.set_postfix(kl=f"{now:.4f}")
            stale = 0 if now < best else stale + 1
            if now < best:
                best, kept = now, [w.clone() for w in wide]
            if stale == PATIENCE:
                break
        for f, value in zip(fitted, kept, strict=True):
            f.parameter.data.copy_(value)


@torch.no_grad()
def divergence(model: Any, batches: list[dict[str, Tensor]]) -> float:
    """Mean KL(unpatched ‖ patched) of the next-token distributions, in nats a token."""
    return sum(float(_divergence(model, batch)) for batch in batches) / len(batches)


def _divergence(model: Any, batch: dict[str, Tensor]) -> Tensor:
    inputs = {key: value.to(input_device(model)) for key, value in batch.items()}
    with torch.no_grad(), as_unpatched(model):
        target = F.log_softmax(model(**inputs, use_cache=False).logits.float(), dim=-1)
    predicted = F.log_softmax(model(**inputs, use_cache=False).logits.float(), dim=-1)
    token = F.kl_div(predicted, target, log_target=True, reduction="none").sum(-1)
    if "attention_mask" not in inputs:
        return token.mean()
    real = inputs["attention_mask"].to(token.device).bool()
    return token[real].mean()


def check_movable(model: nn.Module, why: str) -> None:
    """Raise ValueError if the projections' weights can't be moved for good: offloaded, quantised, under adapters."""
    parts = [part for layer in patched_layers(model).values() for part in _projections(layer)]
    if any(map(is_adapter_layer, parts)):
        raise ValueError(
            f"{why} moves weights, and some are under adapters, which do not save them: calibrate before adding these"
        )
    parameters = [p for part in parts for p in part.parameters()]
    if any(p.is_meta for p in parameters):
        raise ValueError(f'{why} moves weights, and some are offloaded: use method="fit", or a larger machine')
    if not all(p.is_floating_point() for p in parameters):
        raise ValueError(f"{why} moves weights, and some are quantised: calibrate in full precision, then quantise")


def _gains(model: nn.Module) -> list[nn.Parameter]:
    norms = [norm for layer in patched_layers(model).values() for norm in head_norms(layer).values()]
    return [p for norm in norms for p in norm.parameters()]


def _projections(layer: QKNormAttention) -> list[nn.Module]:
    return [layer.get_submodule(part) for part in layer.family.style.weights]


def _query_key_weights(layer: QKNormAttention) -> list[_Fitted]:
    """The projections' weights (and biases) as far as queries and keys come from them: one may hold values as well."""
    parameters = [p for part in _projections(layer) for p in part.parameters()]
    probe = torch.ones(1, 1, layer.config.hidden_size, device=parameters[0].device, dtype=parameters[0].dtype)
    flags = [p.requires_grad for p in parameters]
    with torch.enable_grad():
        for p in parameters:
            p.requires_grad_(True)
        q, k, *_ = layer.family.style.project(layer, probe)
        reached = torch.autograd.grad(q.sum() + k.sum(), parameters, allow_unused=True)
    for p, flag in zip(parameters, flags, strict=True):
        p.requires_grad_(flag)
    rate = PROJECTION_RATE / layer.config.hidden_size
    return [_Fitted(p, rate, g != 0) for p, g in zip(parameters, reached, strict=True) if g is not None and g.any()]


@contextmanager
def _alone(model: nn.Module, fitted: list[_Fitted]) -> Iterator[list[Tensor]]:
    """The fitted parameters alone in needing gradients, and wide copies of them to step; flags come back afterwards."""
    flags = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for p, _ in flags:
            p.requires_grad_(False)
        for f in fitted:
            f.parameter.requires_grad_(True)
        yield [
            f.parameter.detach().to(torch.promote_types(f.parameter.dtype, torch.float32), copy=True) for f in fitted
        ]
    finally:
        for f in fitted:
            f.parameter.grad = None
        for p, flag in flags:
            p.requires_grad_(flag)


@torch.no_grad()
def _step(optimizer: torch.optim.Optimizer, fitted: list[_Fitted], wide: list[Tensor]) -> None:
    """Step the wide copies by the parameters' gradients, and round them back into the parameters."""
    for f, w in zip(fitted, wide, strict=True):
        grad = f.parameter.grad
        assert grad is not None
        w.grad = (grad if f.mask is None else grad * f.mask).to(w.dtype)
        f.parameter.grad = None
    optimizer.step()
    for f, w in zip(fitted, wide, strict=True):
        f.parameter.data.copy_(w)
