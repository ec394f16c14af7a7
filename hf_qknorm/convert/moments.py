"""Gains in closed form for any knee, from one pass through the unpatched model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_qknorm.convert.sums import NormSums, Sizes
from hf_qknorm.model.attention import QKNormAttention, as_unpatched, head_norms, patched_layers
from hf_qknorm.model.fold import set_spread
from hf_qknorm.model.hooks import input_device
from hf_qknorm.model.knees import centred_and_size, put_knee
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.stats.distributed import ONE_PROCESS, Ranks, copy_into, reshard

Batches = Sequence[dict[str, Tensor]]
Key = tuple[str, str]  # of a norm: its layer's name and its own


class Moments:
    """The sums of every norm of a patched model over a text: gains for any of the knees that they were made for."""

    def __init__(self, model: Any, sums: Mapping[Key, NormSums], ranks: Ranks) -> None:
        self.model, self.sums, self.ranks = model, sums, ranks
        self.powers = {key: found.sizes.mean for key, found in sums.items()}

    def put(self, knee: float, *, gains: bool = True) -> None:
        """Give the model this knee, and the gains and biases that fit it, or with `gains=False` the knee alone."""
        reshard(self.model)
        put_knee(self.model, knee, self.powers)
        for name, layer in patched_layers(self.model).items() if gains else ():
            self._set_gains(name, layer, knee)

    @torch.no_grad()
    def _set_gains(self, name: str, layer: QKNormAttention, knee: float) -> None:
        """Write the gains; q's also makes up for a changed scale, and for keys that are normed without a gain."""
        norms = head_norms(layer)
        for norm_name, norm in norms.items():
            if norm.weight is None:
                continue
            shape = self.ranks.local_part(norm.weight).shape
            gain, bias = self.sums[name, norm_name].solve(knee, shape, norm.bias is not None, self.ranks)
            factor = 1.0
            if norm_name == "q_norm" or (norm_name == "k_norm" and "q_norm" not in norms):
                factor = layer.own_scale / layer.logit_scale
            if norm_name == "q_norm" and "k_norm" in norms and norms["k_norm"].weight is None:
                keys = self.sums[name, "k_norm"].solve(knee, (1,), False, self.ranks)
                factor *= float(keys[0])
            copy_into(norm.weight, gain * factor)
            if norm.bias is not None:
                copy_into(norm.bias, bias * factor)


def moments(
    model: Any, batches: Batches, expected: Mapping[Key, float], knees: Sequence[float], ranks: Ranks = ONE_PROCESS
) -> Moments:
    """The sums of a patched model's norms over `batches`, in one pass through the unpatched model.

    `expected` are the norms' mean |x|ᵖ as far as they are known (`norm_sizes`): where the text's are others by a factor
    of more than 4, there is a second pass. Ranks that share a model take a part of the batches each.
    """
    for _ in range(2):
        sums = {key: NormSums(norm, knees, expected[key]) for key, norm in norms_of(model).items()}
        with _shown(model, {key: found.add for key, found in sums.items()}) as show:
            for batch, real in tqdm(ranks.own_batches(batches), desc="moments", unit="batch", leave=False):
                show(batch, real)
        for found in sums.values():
            found.sizes.total = ranks.sum_over_data(ranks.sum_over_heads(found.sizes.total))
            found.sums = [ranks.sum_over_data(x) for x in found.sums]
        if all(found.holds(knee) for found in sums.values() for knee in knees):
            break
        expected = {key: found.sizes.mean for key, found in sums.items()}
    return Moments(model, sums, ranks)


def norm_sizes(model: Any, batches: Batches, ranks: Ranks = ONE_PROCESS) -> dict[Key, float]:
    """The mean |x|ᵖ of the vectors that arrive at each norm of a patched model, by the unpatched model."""
    sizes = {key: Sizes() for key in norms_of(model)}

    def add(key: Key, norm: HeadNorm, x: Tensor) -> None:
        sizes[key].add(centred_and_size(norm, x)[1])

    with _shown(model, {key: partial(add, key, norm) for key, norm in norms_of(model).items()}) as show:
        for batch in batches:
            show(batch, True)
    for found in sizes.values():
        found.total = ranks.sum_over_heads(found.total)
    return {key: found.mean for key, found in sizes.items()}


def norms_of(model: nn.Module) -> dict[Key, HeadNorm]:
    """The norms of a patched model by their layer's name and their own."""
    return {
        (layer_name, name): norm
        for layer_name, layer in patched_layers(model).items()
        for name, norm in head_norms(layer).items()
    }


@contextmanager
def _shown(model: Any, observers: Mapping[Key, Any]) -> Iterator[Any]:
    """Within: `show(batch, real)` runs the unpatched model, and shows each norm's observer its inputs `[N, H, D]`.

    Padding is left out, and everything where `real` is False.
    """
    norms, valid = norms_of(model), None

    def look(key: Key, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach().flatten(0, 1)
        if valid is not None:
            x = x[valid.to(x.device).flatten()]
        observers[key](x)

    @torch.no_grad()
    def show(batch: dict[str, Tensor], real: bool) -> None:
        nonlocal valid
        mask = batch.get("attention_mask")
        valid = None if mask is None else mask.bool()
        if not real:
            valid = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
        with as_unpatched(model):
            model(**{key: value.to(input_device(model)) for key, value in batch.items()}, use_cache=False)

    hooks = [norm.register_forward_pre_hook(partial(look, key)) for key, norm in norms.items()]
    try:
        yield show
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def fit_spread(model: Any, batches: Batches) -> None:
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
                model(**{key: value.to(input_device(model)) for key, value in batch.items()}, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for layer, (total, count) in sums.items():
        set_spread(layer, float(total / count))
