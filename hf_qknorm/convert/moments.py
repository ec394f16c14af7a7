"""Gains in closed form, from the second moments of queries, keys and values."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from hf_qknorm.attention import NORM_NAMES, QKNormAttention, as_unpatched, head_norms, patched_layers
from hf_qknorm.fold import set_spread
from hf_qknorm.norms import HeadNorm
from hf_qknorm.ops.reference import head_norm


class _Moments:
    """Sums over tokens of n², n·x, n, x and 1, per head and channel `[H, D]` in fp64, of inputs x and their norms n."""

    def __init__(self, norm: HeadNorm) -> None:
        self.norm = norm
        self.sums = [torch.zeros((), dtype=torch.float64)] * 5
        self.valid: Tensor | None = None

    def __call__(self, module: HeadNorm, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach().flatten(0, 1)
        if self.valid is not None:
            x = x[self.valid.to(x.device).flatten()]
        x = x.float() if x.device.type == "mps" else x.double()
        n = head_norm(x, module.norm, eps=module.eps, p=module.p)
        new = (n * n, n * x, n, x, torch.ones_like(x))
        self.sums = [old + y.sum(0).cpu().double() for old, y in zip(self.sums, new, strict=True)]

    def solve(self, shape: torch.Size, bias: bool) -> tuple[Tensor, Tensor]:
        """The least-squares gain and bias of x ≈ gain·n + bias, for a gain of `shape`: `[H, D]`, `[D]` or `[1]`."""
        pooled = {2: (), 1: (0,) if shape[0] == self.sums[0].shape[1] else (0, 1)}[len(shape)]
        nn, nx, n, x, count = (s.sum(pooled, keepdim=True) if pooled else s for s in self.sums)
        if bias:
            nn, nx = nn - n * n / count, nx - n * x / count
        gain = torch.where(nn > 0, nx / nn.clamp_min(torch.finfo(nn.dtype).tiny), 1.0)
        offset = (x - gain * n) / count if bias else torch.zeros_like(gain)
        return gain.reshape(shape), offset.reshape(shape)


@torch.no_grad()
def fit_spread(model: Any, batches: list[dict[str, Tensor]]) -> None:
    """Where norms were folded away, scale weights so that the projections' biases are right for the text's mean σ."""
    layers = patched_layers(model).values()
    sums = dict.fromkeys(layers, torch.zeros(2, dtype=torch.float64))
    valid: Tensor | None = None

    def add(layer: QKNormAttention, norm: Any, args: tuple[Tensor, ...]) -> None:
        sigma = norm.sigma(args[0])[..., 0].double().cpu()
        sigma = sigma if valid is None else sigma[valid]
        sums[layer] = sums[layer] + torch.stack([sigma.sum(), torch.tensor(float(sigma.numel()))])

    hooks = [layer.removed_norm[0].register_forward_pre_hook(partial(add, layer)) for layer in layers]
    try:
        with as_unpatched(model):
            for batch in batches:
                valid = batch["attention_mask"].bool().cpu() if "attention_mask" in batch else None
                model(**{key: value.to(model.device) for key, value in batch.items()}, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for layer, (total, count) in sums.items():
        set_spread(layer, float(total / count))


@torch.no_grad()
def fit_moments(model: Any, batches: list[dict[str, Tensor]]) -> None:
    """Set every gain and bias by least squares, x ≈ gain·norm(x) + bias, in one pass through the unpatched model."""
    layers = patched_layers(model)
    moments: dict[tuple[str, str], _Moments] = {}
    hooks = []
    for layer_name, layer in layers.items():
        norms = head_norms(layer)
        for field, name in NORM_NAMES.items():
            if norm := norms.get(name):
                moments[layer_name, field] = _Moments(norm)
                hooks.append(norm.register_forward_pre_hook(moments[layer_name, field]))
    try:
        with as_unpatched(model):
            for batch in tqdm(batches, desc="moments", unit="batch", leave=False):
                for moment in moments.values():
                    mask = batch.get("attention_mask")
                    moment.valid = None if mask is None else mask.bool()
                model(**{key: value.to(model.device) for key, value in batch.items()}, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for layer_name, layer in layers.items():
        _set_gains(layer, {field: moments[layer_name, field] for field in NORM_NAMES if (layer_name, field) in moments})


def _set_gains(layer: QKNormAttention, moments: dict[str, _Moments]) -> None:
    """Write the fitted gains; q's also makes up for a changed scale, and for keys that are normed without a gain."""
    for field, moment in moments.items():
        norm = moment.norm
        if norm.weight is None:
            continue
        gain, bias = moment.solve(norm.weight.shape, norm.bias is not None)
        factor = 1.0
        if field == "q" or (field == "k" and "q" not in moments):
            factor = layer.own_scale / layer.logit_scale
        if field == "q" and "k" in moments and moments["k"].norm.weight is None:
            factor *= float(moments["k"].solve(torch.Size((1,)), bias=False)[0])
        norm.weight.copy_(gain * factor)
        if norm.bias is not None:
            norm.bias.copy_(bias * factor)
