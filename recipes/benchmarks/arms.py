"""The variants that the sweep of learning rates and the table of costs compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_qknorm import SCHEMES, QKClip, QuacK, Scheme
from hf_qknorm.measure.head_weights import parameter_factors


def keep(model: Any, optimizer: Optimizer) -> Optimizer:
    return optimizer


def leave(model: Any) -> None:
    pass


@dataclass(frozen=True)
class Arm:
    """One way to train a GPT-2: a scheme, further changes of the new model, and a wrapper around the optimizer."""

    scheme: str | Scheme = "none"
    around: Callable[[Any, Optimizer], Optimizer] = keep
    change: Callable[[Any], None] = leave
    paper: float | None = None  # the largest rate that does not diverge, as second-hand reports give Rybakov's table


class ConstantQuacK(QuacK):
    """QuacK's ablation: steps of queries and keys have the constant factor `tau`, whatever the weights."""

    def _scales(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for parts in self.layers.values():
            factors = {name: torch.full((part.heads,), self.tau) for name, part in parts.items()}
            yield from parameter_factors(parts, factors)


class WeightsQuacK(QuacK):
    """QuacK by the norms of the weights alone, as published: neither biases nor the norm before attention count."""

    def __init__(self, optimizer: Optimizer, model: Any) -> None:
        super().__init__(optimizer, model)
        self.start: dict[str, dict[str, Tensor]] = {}

    def _scales(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for layer, parts in self.layers.items():
            norms = {name: part.norms(part.weight.detach()) for name, part in parts.items()}
            first = self.start.setdefault(layer, norms)
            yield from parameter_factors(parts, {"q": first["k"] / norms["k"], "k": first["q"] / norms["q"]})


def weights_quack(model: Any, optimizer: Optimizer) -> Optimizer:
    return WeightsQuacK(optimizer, model)


def quack(model: Any, optimizer: Optimizer, tau: float = 1.0) -> Optimizer:
    return QuacK(optimizer, model, tau)


def constant(model: Any, optimizer: Optimizer, tau: float) -> Optimizer:
    return ConstantQuacK(optimizer, model, tau)


def qk_clip(model: Any, optimizer: Optimizer) -> Optimizer:
    clip = QKClip(model)
    optimizer.register_step_post_hook(lambda *_: clip.step())
    return optimizer


def norm_outputs(model: Any) -> None:
    """Add a LayerNorm after the output projections of attention and of the MLP ("Proj" and "FC2")."""
    for block in model.transformer.h:
        for part in (block.attn, block.mlp):
            part.c_proj = nn.Sequential(part.c_proj, nn.LayerNorm(model.config.n_embd))


def remove_pre_norm(model: Any) -> None:
    for block in model.transformer.h:
        block.ln_1 = nn.Identity()


def plain_pre_norm(model: Any) -> None:
    """Replace the norm before attention by one without gain and bias."""
    for block in model.transformer.h:
        block.ln_1 = nn.LayerNorm(model.config.n_embd, elementwise_affine=False)


@torch.no_grad()
def small_values(model: Any) -> None:
    """Start the gain of the value norm at the rms of an unpatched model's values."""
    for block in model.transformer.h:
        block.attn.v_norm.weight.fill_(model.config.initializer_range * model.config.n_embd**0.5)


QKV = SCHEMES["qkv_norm"]
QKV_AND_PRE = dataclasses.replace(QKV, pre_norm=True)

ARMS = {
    "baseline": Arm(paper=6e-3),
    "soft_cap": Arm("soft_cap", paper=40e-3),
    "qk_norm": Arm("qk_norm", paper=40e-3),
    "qk_norm_cap": Arm("qk_norm_cap", paper=60e-3),
    "qkv_norm": Arm("qkv_norm", paper=60e-3),
    "QK_FC_norm": Arm("qk_norm", change=norm_outputs, paper=40e-3),
    "QK-clip": Arm(around=qk_clip),
    "QuacK": Arm(around=quack),
}

# What makes qkv_norm worse than qk_norm at small rates? The arms lie between the two.
QKV_ARMS = {
    "qk_norm": ARMS["qk_norm"],
    "qk_norm, pre-norm without gain and bias": Arm("qk_norm", change=plain_pre_norm),
    "qk_norm without pre-norm": Arm("qk_norm", change=remove_pre_norm),
    "qkv_norm": ARMS["qkv_norm"],
    "qkv_norm, eps 1e-12": Arm(dataclasses.replace(QKV, eps=1e-12)),
    "qkv_norm, small value gain": Arm(QKV, change=small_values),
    "qkv_norm with pre-norm": Arm(QKV_AND_PRE),
    "qkv_norm with pre-norm, small value gain": Arm(QKV_AND_PRE, change=small_values),
}

# QuacK's factor τ, and its ablations: norms of weights alone, and a constant factor α in place of the ratio.
QUACK_ARMS = {
    "baseline": ARMS["baseline"],
    **{f"QuacK, τ = {tau:g}": Arm(around=partial(quack, tau=tau)) for tau in (0.1, 0.3)},
    "QuacK": ARMS["QuacK"],
    "QuacK, τ = 3": Arm(around=partial(quack, tau=3.0)),
    "QuacK, weights alone": Arm(around=weights_quack),
    **{f"constant, α = {alpha:g}": Arm(around=partial(constant, tau=alpha)) for alpha in (0.03, 0.1, 0.3)},
}

ALL_ARMS = {**ARMS, **QKV_ARMS, **QUACK_ARMS}
