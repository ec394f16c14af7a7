"""QuacK: per-head learning rates of queries and keys that fall as the vectors on the other side grow.

A step ΔW_Q changes a logit by (ΔW_Q·x)·k, at most ‖ΔW_Q‖·‖x‖·‖k‖, with x the input of the projection. Each head's
steps of W_Q are therefore scaled by τ·(|x|·|k|)₀/(|x|·|k|): |·| is the root mean square over isotropic inputs, and ₀
its value before the first step. W_K's are scaled in the same way by |x|·|q|. Behind a norm with gain g and bias
β, that is for x = g·x̂ + β and k = W_K·x + b, |k|² = ‖W_K·diag(g)‖² + ‖W_K·β + b‖², and |x|² is the mean of g² + β². A
step of the projection's bias changes a logit by Δb·k, whatever x is: its factor is the weight's without |x|.

Source: Anson & Aitchison 2025 (arXiv 2511.21377), lemma 1 and algorithm 1. The paper has inputs of length 1 and no
biases: there |k| is ‖W_K‖, and |x| is constant. Not in the paper: gains and biases; and several query heads that share
a key head count by the largest of their sizes. For latent attention the paper's algorithm 2 multiplies the norms of all
weights from the input to the head. The models here norm their latents, so that the weights W_D before a latent do not
change its size: they do not count for the others, and their own rates are relative to the latent before its norm, τ
times the ratio of |W_D·x|/(|x|·|q|·|k|) to its initial value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_qknorm.files.log import logger
from hf_qknorm.files.untrusted import check_positive
from hf_qknorm.measure.head_weights import (
    Sizes,
    attention_head_weights,
    attention_layers,
    normed_sides,
    parameter_factors,
    sizes,
)

if TYPE_CHECKING:
    from transformers import Trainer  # slow to import

RATE = "quack_rate_"  # before a part's name, in the state of its weight: its initial rates
ByPart = dict[str, Tensor]  # part name → `[heads]`


def _delegated(name: str) -> Any:
    """An attribute or method of the wrapped optimiser."""
    return property(lambda self: getattr(self.optimizer, name), lambda self, new: setattr(self.optimizer, name, new))


class QuacK(Optimizer):
    """An optimiser that wraps another one, and scales its steps on queries and keys by head.

    It works with schedulers and gradient scalers. The model may be patched or not, and sharded by FSDP2 before or
    after. `tau` (default 1) scales all these steps. In a Trainer, `QuacK.attach` wraps the Trainer's own optimiser:

        >>> trainer = qk.QuacK.attach(trainer)
        >>> optimizer = qk.QuacK(torch.optim.AdamW(model.parameters(), lr=1e-3), model)  # without a Trainer
        >>> ids = torch.arange(8)[None]
        >>> model(ids, labels=ids).loss.backward()
        >>> optimizer.step()
        >>> optimizer.param_groups[0]["lr"]
        0.001

    The whole step is scaled, decoupled weight decay included: with SGD, AdamW and Muon this equals a learning rate per
    head. A copy of the weights of queries and keys (of values too, if fused) is kept during the step: 1.3 GB for an 8B
    Llama in bfloat16. Optimisers with their own weights (fp32 copies, slow weights) would undo the scaling.

    Sizes count the gain and bias of the norm in front of attention, and the biases of the projections. Where no norm
    is in front of attention (OLMo 2, BERT), the input counts as constant. Steps of that norm's own gain and bias change
    logits too, and are not scaled. `state_dict` holds the initial rates; after a state without them is loaded, the next
    step measures them anew.

    Logs a warning for a model with norms of queries or keys, which remove the sizes that the rates depend on.

    Raises ValueError for a model with projections of an unknown kind, for an optimiser without their weights (as after
    FSDP1, which flattens them), for a head whose weights are all zero, and for a `tau` that is not positive. Source:
    Anson & Aitchison 2025 (arXiv 2511.21377).
    """

    param_groups = _delegated("param_groups")
    state = _delegated("state")
    defaults = _delegated("defaults")
    zero_grad = _delegated("zero_grad")
    add_param_group = _delegated("add_param_group")

    def __init__(self, optimizer: Optimizer, model: nn.Module, tau: float = 1.0) -> None:
        self.optimizer, self.tau = optimizer, check_positive(tau, "tau")
        self.layers = attention_head_weights(model)
        self.first: dict[tuple[str, str], Tensor] = {}  # initial rates by layer and part, `[2, heads]`
        self._own()  # raises without these weights
        _warn_of_norms(model)
        super().__setstate__({})  # sets up hooks and profiling; parameters belong to the wrapped optimiser

    @classmethod
    def attach(cls, trainer: Trainer, tau: float = 1.0) -> Trainer:
        """Wrap the optimiser that a Trainer makes from its arguments, or was given; returns the Trainer.

        Learning rate, betas, weight decay and schedule thus come from the Trainer's arguments. `tau` is QuacK's.

            >>> trainer = qk.QuacK.attach(trainer)
            >>> trainer.train().global_step
            3
            >>> type(trainer.optimizer.optimizer).__name__
            'QuacK'

        Raises ValueError for a Trainer that has trained, has QuacK already, trains with DeepSpeed, which keeps its own
        copies of the weights, or trains no weight of queries and keys; and as `QuacK` does.
        """
        check_positive(tau, "tau")
        if trainer.is_deepspeed_enabled:
            raise ValueError("QuacK does not support DeepSpeed, which steps its own copies of the weights: use FSDP2")
        if isinstance(trainer.optimizer, cls | AcceleratedOptimizer) or isinstance(trainer.create_optimizer, partial):
            raise ValueError("the Trainer has trained or has QuacK already: attach QuacK once, to a new Trainer")
        parts = [part for layer in attention_head_weights(trainer.model).values() for part in layer.values()]
        if not any(part.weight.requires_grad for part in parts):
            raise ValueError("no weight of queries and keys is trained, as with LoRA: QuacK would do nothing")
        if trainer.optimizer is None:
            trainer.create_optimizer = partial(cls._create, trainer, trainer.create_optimizer, tau)
        else:
            trainer.optimizer = cls(trainer.optimizer, trainer.model, tau)
        return trainer

    @classmethod
    def _create(cls, trainer: Trainer, create: Callable[..., Optimizer], tau: float, *arguments: Any) -> Optimizer:
        """The Trainer's optimiser: an earlier run's, or the one that `create` makes, wrapped."""
        if trainer.optimizer is None:
            trainer.optimizer = cls(create(*arguments), trainer.model, tau)
        return trainer.optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the wrapped optimiser's step, scale it by head, and return its result."""
        own = self._own()
        with torch.no_grad():  # by identity: layers may share weights
            moved = {id(p): (p, p.detach().clone(), scale) for p, scale in self._scales() if id(p) in own}
        loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        with torch.no_grad():
            for p, old, scale in moved.values():
                p.copy_(p + (p.to(scale.dtype) - old) * (scale - 1))  # exactly p where the scale is 1
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimiser's state, with the initial rates in the state of the weights."""
        state: dict[str, Any] = self.optimizer.state_dict()
        entries = dict(state["state"])
        for index, layer, name in self._numbered(state):
            if (layer, name) in self.first:
                entries[index] = {**entries.get(index, {}), RATE + name: self.first[layer, name]}
        return {**state, "state": entries}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; without initial rates in it, the next step's rates are the initial ones."""
        entries = {index: dict(entry) for index, entry in state_dict["state"].items()}
        self.first = {}
        for index, layer, name in self._numbered(state_dict):  # torch's loading would cast them to the weight's dtype
            if (rates := entries.get(index, {}).pop(RATE + name, None)) is not None:
                self.first[layer, name] = rates.to(self.layers[layer][name].weight.device)
        self.optimizer.load_state_dict({**state_dict, "state": {i: entry for i, entry in entries.items() if entry}})

    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()

    def _scales(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the weights and biases of projections with the factors of their steps, which broadcast."""
        for layer, parts in self.layers.items():
            present = sizes(parts)
            now = learning_rates(present)
            if new := [name for name in parts if (layer, name) not in self.first]:
                _check_sizes(layer, present, new)
                self.first |= {(layer, name): now[name] for name in new}
            yield from parameter_factors(parts, {n: self.tau * (now[n] / self.first[layer, n]) for n in parts})

    def _numbered(self, state_dict: dict[str, Any]) -> Iterator[tuple[Any, str, str]]:
        """Yield, for the weight of each part that the optimiser has, its index in `state_dict`, layer and name."""
        groups = zip(self.param_groups, state_dict["param_groups"], strict=True)
        numbers = {id(p): n for own, saved in groups for p, n in zip(own["params"], saved["params"], strict=True)}
        for layer, parts in self.layers.items():
            for name, part in parts.items():
                if id(part.weight) in numbers:
                    yield numbers[id(part.weight)], layer, name

    def _own(self) -> set[int]:
        """The identities of the optimiser's parameters. Raises ValueError without a weight of queries and keys."""
        own = {id(p) for group in self.param_groups for p in group["params"]}
        if not any(id(part.weight) in own for parts in self.layers.values() for part in parts.values()):
            raise ValueError(
                f"the {type(self.optimizer).__name__} has none of the weights of queries and keys of this model: pass "
                "it model.parameters(), and shard the model, if at all, by FSDP2 (fully_shard)"
            )
        return own


def learning_rates(present: Sizes) -> dict[str, Tensor]:
    """The learning rates of a layer's parts up to a constant, `[2, heads]`: of the weights, and of the biases."""
    rates = (_rates if "q" in present.outputs else _latent_rates)(present.outputs)
    return {name: torch.stack([rate / present.inputs[name], rate]) for name, rate in rates.items()}


def _rates(outputs: ByPart) -> ByPart:
    """The rates of queries and keys for inputs of constant size, from the sizes of their outputs, `[heads]`."""
    q, k = outputs["q"], outputs["k"]
    group = len(q) // len(k)
    return {"q": 1 / k.repeat_interleave(group), "k": 1 / q.view(-1, group).amax(1)}


def _latent_rates(outputs: ByPart) -> ByPart:
    """The rates where norms follow the weights down to the latents, `dq` and `dkv`.

    A step of these changes the normed latent by the step's size over the size of the latent before the norm.
    """
    uq, qr, uk, kr, dkv = (outputs[name] for name in ("uq", "qr", "uk", "kr", "dkv"))
    plain, rotated = (uq * uk).amax(0, keepdim=True), qr.amax(0, keepdim=True)
    rates = {"uq": 1 / uk, "uk": 1 / uq, "qr": (1 / kr).expand_as(qr), "kr": 1 / rotated, "dkv": dkv / plain}
    return rates if "dq" not in outputs else rates | {"dq": outputs["dq"] / torch.maximum(plain, rotated * kr)}


def _check_sizes(layer: str, present: Sizes, names: Sequence[str]) -> None:
    """Raise ValueError for a head whose queries or keys are zero."""
    for name in names:
        if len(zero := (present.outputs[name] * present.inputs[name] == 0).nonzero()):
            raise ValueError(
                f"{layer}: the weights {name!r} of head {int(zero[0])} are all zero, or the gain of the norm before "
                "them, and QuacK's learning rates are relative to their size before the first step: initialise or load "
                "them first"
            )


def _warn_of_norms(model: nn.Module) -> None:
    """Log a warning for a model that norms its queries or keys, itself or by a scheme."""
    normed = {name: normed_sides(layer, family) for name, layer, family in attention_layers(model)}
    found = [name for name, sides in normed.items() if sides]
    if found:
        sides = " and ".join({"q": "queries", "k": "keys"}[side] for side in normed[found[0]])
        logger.warning(
            f"QuacK on a model that norms its {sides} ({found[0]}, {len(found)} of {len(normed)} layers): QuacK's "
            "rates follow the size of these vectors, which the norm removes, and logits do not depend on it. Leave "
            "QuacK out, or train without these norms"
        )
