"""Gains in closed form for any knee, from one pass of text through the unpatched model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from hf_qknorm.convert.norm_sums import Mean, NormSums
from hf_qknorm.model.accelerate_hooks import input_device
from hf_qknorm.model.attention import QKNormAttention, as_unpatched, head_norms, patched_layers
from hf_qknorm.model.fold import set_spread
from hf_qknorm.model.knees import apply_knee
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.stats.distributed import ONE_PROCESS, Batches, Ranks, copy_into, reshard

NormKey = tuple[str, str]  # a layer's name, and the name of a norm in it


class ClosedFormGains:
    """The sums of every norm of a patched model over a text, and the gains that follow from them for any knee.

    The text takes one pass through the unpatched model. Ranks with different data divide its `batches`. `expected` is
    the mean |x|ᵖ of each norm on a sample (`mean_powers`). Where the text's is more than four times larger or smaller,
    there is a second pass.
    """

    def __init__(
        self,
        model: Any,
        batches: Batches,
        expected: Mapping[NormKey, float],
        knees: Sequence[float],
        ranks: Ranks = ONE_PROCESS,
    ) -> None:
        self.model, self.ranks, self.powers = model, ranks, expected
        for _ in range(2):
            self.sums = {key: NormSums(norm, knees, self.powers[key]) for key, norm in named_norms(model).items()}
            with _observed_inputs(model, {found.norm: found.add for found in self.sums.values()}) as run:
                for batch, counts in tqdm(ranks.own_batches(batches), desc="moments", unit="batch", leave=False):
                    run(batch, counts)
            for found in self.sums.values():
                found.power.total = ranks.sum_over_data(ranks.sum_over_heads(found.power.total))
                found.sums = [ranks.sum_over_data(x) for x in found.sums]
            self.powers = {key: found.power.value for key, found in self.sums.items()}
            if all(found.covers(knee) for found in self.sums.values() for knee in knees):
                break

    def apply(self, knee: float, *, gains: bool = True) -> None:
        """Set this knee, and the gains and biases that fit it; with `gains=False` the knee alone."""
        reshard(self.model)
        apply_knee(self.model, knee, self.powers)
        for name, layer in patched_layers(self.model).items() if gains else ():
            self._set_gains(name, layer, knee)

    @torch.no_grad()
    def _set_gains(self, name: str, layer: QKNormAttention, knee: float) -> None:
        """Write a layer's gains; q's includes the change of the logits' scale, and the gain of keys without one."""
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
                keys, _ = self.sums[name, "k_norm"].solve(knee, (1,), False, self.ranks)
                factor *= float(keys)
            copy_into(norm.weight, gain * factor)
            if norm.bias is not None:
                copy_into(norm.bias, bias * factor)


def mean_powers(model: Any, batches: Batches, ranks: Ranks = ONE_PROCESS) -> Mapping[NormKey, float]:
    """The mean |x|ᵖ of the inputs of each norm of a patched model, computed by the unpatched model."""
    return ClosedFormGains(model, batches, dict.fromkeys(named_norms(model), 0.0), (), ranks).powers


def named_norms(model: nn.Module) -> dict[NormKey, HeadNorm]:
    """The norms of a patched model by their layer's name and their own."""
    layers = patched_layers(model).items()
    return {(layer_name, name): norm for layer_name, layer in layers for name, norm in head_norms(layer).items()}


def rescale_folded_weights(model: Any, batches: Batches) -> None:
    """Rescale the projections behind folded norms, so that their biases are right for the text's mean σ."""
    sigmas = {layer: Mean() for layer in patched_layers(model).values()}

    def observer(layer: QKNormAttention) -> Callable[[Tensor], None]:
        norm: Any = layer.removed_norm[0]
        return lambda x: sigmas[layer].add(norm.sigma(x).double())

    with _observed_inputs(model, {layer.removed_norm[0]: observer(layer) for layer in sigmas}) as run:
        for batch in batches:
            run(batch, True)
    for layer, sigma in sigmas.items():
        set_spread(layer, sigma.value)


@contextmanager
def _observed_inputs(
    model: Any, observers: Mapping[nn.Module, Callable[[Tensor], None]]
) -> Iterator[Callable[[dict[str, Tensor], bool], None]]:
    """Yield `run(batch, counts)`: a pass of the unpatched model in which each module's observer gets its inputs.

    Inputs are `[N, ...]`, a row for each token that is not padding; none where `counts` is False.
    """
    counted: Tensor | None = None

    def observe(observer: Callable[[Tensor], None], module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach().flatten(0, 1)
        observer(x if counted is None else x[counted.to(x.device)])

    @torch.no_grad()
    def run(batch: dict[str, Tensor], counts: bool) -> None:
        nonlocal counted
        mask = batch.get("attention_mask") if counts else torch.zeros_like(batch["input_ids"])
        counted = None if mask is None else mask.bool().flatten()
        with as_unpatched(model):
            model(**{key: value.to(input_device(model)) for key, value in batch.items()}, use_cache=False)

    with ExitStack() as hooks:
        for module, observer in observers.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(observe, observer)))
        yield run
