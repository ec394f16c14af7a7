"""QuacK: per-head learning rates of queries and keys that fall as the vectors on the other side grow.

A step ΔW_Q changes a logit by (ΔW_Q·x)·k, at most ‖ΔW_Q‖·‖x‖·‖k‖, with x the input of the projection. Each head's
steps of W_Q are therefore scaled by τ·(|x|·|k|)₀/(|x|·|k|): |·| is the root mean square over isotropic x̂, and ₀ its
value before the first step. W_K's are scaled in the same way by |x|·|q|. Behind a norm with gain g and bias β, x is
g·x̂ + β, and |k|² = ‖W_K·diag(g)‖² + ‖W_K·β + b‖². A step of the projection's bias b changes a logit by Δb·k, whatever
x is: its factor is the weight's without |x|.

Source: Anson & Aitchison 2025 (arXiv 2511.21377), lemma 1, algorithms 1 and 2. Not in the paper: gains and biases;
and several query heads that share a key head count by the largest of their sizes. For latent attention algorithm 2
multiplies the norms of all weights from the input to the head. The models here norm their latents, so that the weights
W_D before a latent do not change its size: they do not count for the others, and their own rates are relative to the
latent before its norm, τ times the ratio of |W_D·x|/(|x|·|q|·|k|) to its initial value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
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

RATES = "quack_rates"  # in the first parameter group: the initial rates by layer and part
ByPart = dict[str, Tensor]  # part name → values by head


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
    logits too, and are not scaled. `state_dict` holds the initial rates, in its first parameter group; after a state
    without them is loaded, the next step measures them anew.

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
    state_dict = _delegated("state_dict")
    load_state_dict = _delegated("load_state_dict")

    def __init__(self, optimizer: Optimizer, model: nn.Module, tau: float = 1.0) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"QuacK wraps an optimiser of PyTorch, got {type(optimizer).__name__}")
        self.optimizer, self.tau = optimizer, check_positive(tau, "tau")
        self.layers = attention_head_weights(model)
        self._own()  # raises without these weights
        if any(normed_sides(layer, family) for _, layer, family in attention_layers(model)):
            logger.warning(
                "this model norms its queries or keys, and QuacK's rates follow the sizes that the norms remove: leave "
                "QuacK out, or train without these norms"
            )
        super().__setstate__({})  # sets up hooks and profiling; parameters belong to the wrapped optimiser

    @classmethod
    def attach(cls, trainer: Trainer, tau: float = 1.0) -> Trainer:
        """Wrap the optimiser that a Trainer makes from its arguments; returns the Trainer.

        Learning rate, betas, weight decay and schedule thus come from the Trainer's arguments. `tau` is QuacK's.

            >>> trainer = qk.QuacK.attach(trainer)
            >>> trainer.train().global_step
            3
            >>> type(trainer.optimizer.optimizer).__name__
            'QuacK'

        Raises ValueError for a Trainer that has an optimiser or QuacK already, or trains with DeepSpeed, which keeps
        its own copies of the weights; and when it makes its optimiser, as `QuacK` does.
        """
        check_positive(tau, "tau")
        if not hasattr(trainer, "create_optimizer"):
            raise TypeError(f"QuacK.attach takes a Trainer, got {type(trainer).__name__}")
        if trainer.is_deepspeed_enabled:
            raise ValueError("QuacK does not support DeepSpeed, which steps its own copies of the weights: use FSDP2")
        if trainer.optimizer is not None or isinstance(trainer.create_optimizer, partial):
            raise ValueError(
                "the Trainer has an optimiser: attach QuacK once, before training, or make the Trainer with "
                "optimizers=(QuacK(optimizer, model), None)"
            )
        trainer.create_optimizer = partial(cls._create, trainer, trainer.create_optimizer, tau)
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

    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()

    def _scales(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the weights and biases of projections with the factors of their steps, which broadcast."""
        first = self.param_groups[0].setdefault(RATES, {})  # as lists, which neither casts nor devices change
        for layer, parts in self.layers.items():
            present = sizes(parts)
            now = learning_rates(present)
            if layer not in first:
                _check_sizes(layer, present)
                first[layer] = {name: rates.tolist() for name, rates in now.items()}
            factors = {name: self.tau * (rates / rates.new_tensor(first[layer][name])) for name, rates in now.items()}
            yield from parameter_factors(parts, factors)

    def _own(self) -> set[int]:
        """The identities of the optimiser's parameters. Raises ValueError without a weight of queries and keys."""
        own = {id(p) for group in self.param_groups for p in group["params"]}
        if not any(id(part.weight) in own for parts in self.layers.values() for part in parts.values()):
            raise ValueError(
                f"the {type(self.optimizer).__name__} has none of the weights of queries and keys of this model: pass "
                "it model.parameters(), and shard the model, if at all, by FSDP2 (fully_shard)"
            )
        return own


def learning_rates(present: dict[str, Sizes]) -> ByPart:
    """The learning rates of a layer's parts up to a constant, `[2, heads]`: of the weights, and of the biases."""
    rates = (_rates if "q" in present else _latent_rates)(**{name: size.outputs for name, size in present.items()})
    return {name: torch.stack([rate / present[name].inputs, rate]) for name, rate in rates.items()}


def _rates(q: Tensor, k: Tensor) -> ByPart:
    """The rates of queries and keys for inputs of constant size, from the sizes of their outputs, `[heads]`."""
    group = len(q) // len(k)
    return {"q": 1 / k.repeat_interleave(group), "k": 1 / q.view(-1, group).amax(1)}


def _latent_rates(uq: Tensor, qr: Tensor, uk: Tensor, kr: Tensor, dkv: Tensor, dq: Tensor | None = None) -> ByPart:
    """The rates where norms follow the weights down to the latents, `dq` and `dkv`.

    A step of these changes the normed latent by the step's size over the size of the latent before the norm.
    """
    plain, rotated = (uq * uk).amax(0, keepdim=True), qr.amax(0, keepdim=True)
    rates = {"uq": 1 / uk, "uk": 1 / uq, "qr": (1 / kr).expand_as(qr), "kr": 1 / rotated, "dkv": dkv / plain}
    return rates if dq is None else rates | {"dq": dq / torch.maximum(plain, rotated * kr)}


def _check_sizes(layer: str, present: dict[str, Sizes]) -> None:
    """Raise ValueError for a head whose queries or keys are zero."""
    for name, (inputs, outputs) in present.items():
        if len(zero := (outputs * inputs == 0).nonzero()):
            raise ValueError(
                f"{layer}: the weights {name!r} of head {int(zero[0])} are all zero, or the gain of the norm before "
                "them, and QuacK's learning rates are relative to their size before the first step: initialise or load "
                "them first"
            )
