"""Gains by self-distillation: the patched model learns, through its gains alone, to predict as it did unpatched."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_qknorm.attention import as_unpatched
from hf_qknorm.norms import HeadNorm

HELD_OUT = 2  # batches that judge the gains and are not fitted to, where there are enough
CHECKS = 10  # how often in a fit the held-out batches are asked
PATIENCE = 5  # checks without progress before it stops


def fit_gains(
    model: Any, batches: list[dict[str, Tensor]], *, steps: int = 120, rate: float = 0.05, seed: int = 0
) -> None:
    """Minimise KL(unpatched ‖ patched) of the next token over gains and biases, by Adam with a cosine decay.

    The teacher is the same model with its norms bypassed: no second copy. Gains and optimiser state are fp32, whatever
    the model's dtype. The gains kept are those that did best on two batches that were not fitted to, the ones it
    started from included; it stops early when those see no progress.
    """
    cut = HELD_OUT if len(batches) > 2 * HELD_OUT else 0
    held_out, fitted = batches[:cut] or batches, batches[cut:]
    order = random.Random(seed)
    with _only_gains(model) as gains:
        optimizer = torch.optim.Adam(gains, lr=rate, betas=(0.9, 0.99))
        best, kept, stale = divergence(model, held_out), [gain.detach().clone() for gain in gains], 0
        bar = tqdm(range(steps), desc="fit", unit="step", leave=False)
        queue: list[dict[str, Tensor]] = []
        for step in bar:
            queue = queue or order.sample(fitted, len(fitted))
            for group in optimizer.param_groups:
                group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / steps))
            loss = _divergence(model, queue.pop())
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            if (step + 1) % max(steps // CHECKS, 1) and step + 1 != steps:
                continue
            now = divergence(model, held_out)
            bar.set_postfix(kl=f"{now:.4f}")
            stale = 0 if now < best else stale + 1
            if now < best:
                best, kept = now, [gain.detach().clone() for gain in gains]
            if stale == PATIENCE:
                break
        for gain, value in zip(gains, kept, strict=True):
            gain.data = value


@torch.no_grad()
def divergence(model: Any, batches: list[dict[str, Tensor]]) -> float:
    """Mean KL(unpatched ‖ patched) of the next-token distributions, in nats a token."""
    return sum(float(_divergence(model, batch)) for batch in batches) / len(batches)


def _divergence(model: Any, batch: dict[str, Tensor]) -> Tensor:
    inputs = {key: value.to(model.device) for key, value in batch.items()}
    with torch.no_grad(), as_unpatched(model):
        target = F.log_softmax(model(**inputs, use_cache=False).logits.float(), dim=-1)
    predicted = F.log_softmax(model(**inputs, use_cache=False).logits.float(), dim=-1)
    token = F.kl_div(predicted, target, log_target=True, reduction="none").sum(-1)
    if "attention_mask" not in inputs:
        return token.mean()
    real = inputs["attention_mask"].to(token.device).bool()
    return token[real].mean()


@contextmanager
def _only_gains(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The gains and biases in fp32, alone in needing gradients; dtypes and flags come back afterwards."""
    gains = [p for module in model.modules() if isinstance(module, HeadNorm) for p in module.parameters()]
    dtypes = [gain.dtype for gain in gains]
    flags = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for p, _ in flags:
            p.requires_grad_(False)
        for gain in gains:
            gain.data = gain.data.float() if gain.dtype != torch.float64 else gain.data
            gain.requires_grad_(True)
        yield gains
    finally:
        for gain, dtype in zip(gains, dtypes, strict=True):
            gain.data = gain.data.to(dtype)
            gain.grad = None
        for p, flag in flags:
            p.requires_grad_(flag)
