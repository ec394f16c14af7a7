"""Gains by least squares for any ε of a norm, also for one ε per head, which no scheme offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_qknorm.model.attention import as_unpatched, head_norms, patched_layers
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.ops.reference import head_norm

Key = tuple[str, str]  # a layer's name and its norm's


@torch.no_grad()
def squares(model: Any, batches: list[dict[str, Tensor]]) -> dict[Key, Tensor]:
    """Return the mean square of each head's vectors `[N, H]` at the input of each norm, in the unpatched model."""
    seen: dict[Key, list[Tensor]] = {}

    def add(key: Key, norm: HeadNorm, x: Tensor) -> None:
        x = x - x.mean(-1, keepdim=True) if norm.norm == "layer" else x
        seen.setdefault(key, []).append(x.pow(2).mean(-1))

    watch(model, batches, add)
    return {key: torch.cat(parts) for key, parts in seen.items()}


@torch.no_grad()
def solve(model: Any, batches: list[dict[str, Tensor]]) -> None:
    """Fit gains (and biases) by least squares, x ≈ gain·norm(x) + bias, for the ε that the norms have."""
    sums: dict[Key, Tensor] = {}

    def add(key: Key, norm: HeadNorm, x: Tensor) -> None:
        n = head_norm(x, norm.norm, eps=norm.eps)
        new = torch.stack([y.sum(0) for y in (n * n, n * x, n, x, torch.ones_like(x))])
        sums[key] = sums[key] + new if key in sums else new

    watch(model, batches, add)
    for key, norm in norms(model).items():
        if norm.weight is None:
            continue
        pooled = {2: (), 1: (1,) if norm.weight.numel() > 1 else (1, 2)}[norm.weight.dim()]
        square, nx, n, x, count = sums[key].sum(pooled, keepdim=True) if pooled else sums[key]
        if norm.bias is not None:
            square, nx = square - n * n / count, nx - n * x / count
        gain = nx / square
        factor = 1.0
        other = norms(model).get((key[0], "k_norm"))
        if key[1] == "q_norm" and other is not None and other.weight is None:  # a scalar gain is the queries'
            keys = sums[key[0], "k_norm"].sum((1, 2))
            factor = float(keys[1] / keys[0])
        norm.weight.copy_((gain * factor).reshape(norm.weight.shape))
        if norm.bias is not None:
            norm.bias.copy_(((x - gain * n) / count).reshape(norm.bias.shape))


@torch.no_grad()
def watch(model: Any, batches: list[dict[str, Tensor]], add: Callable[[Key, HeadNorm, Tensor], None]) -> None:
    """Pass the vectors `[N, H, D]` at the input of each norm of the unpatched model to `add`, in fp64."""

    def show(key: Key, norm: HeadNorm, args: tuple[Tensor, ...]) -> None:
        add(key, norm, args[0].flatten(0, 1).double())

    hooks = [norm.register_forward_pre_hook(partial(show, key)) for key, norm in norms(model).items()]
    with as_unpatched(model):
        for batch in batches:
            model(**batch, use_cache=False)
    for hook in hooks:
        hook.remove()


def norms(model: Any) -> dict[Key, HeadNorm]:
    return {(n, m): norm for n, layer in patched_layers(model).items() for m, norm in head_norms(layer).items()}


def put(model: Any, epsilons: Mapping[Key, Tensor]) -> None:
    """Set each norm's ε: a number, or `[H, 1]` for one per head, which no scheme offers."""
    for key, norm in norms(model).items():
        del norm.eps
        norm.register_buffer("eps", (epsilons[key] + norm.scheme_eps).float())
