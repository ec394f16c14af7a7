"""QuacK: per-head learning rates of queries and keys that fall as the vectors on the other side grow.

A step ΔW_Q changes a logit by (ΔW_Q·x)·k, at most ‖ΔW_Q‖·‖x‖·‖k‖, with x the input of the projection. Each head's
steps of W_Q are therefore scaled by τ·|k|₀/|k|: |·| is the root mean square over isotropic inputs x of constant size,
and ₀ its value before the first step. W_K's are scaled in the same way by |q|, and the projections' biases like their
weights. With a bias b, |k|² = ‖W_K‖² + ‖b‖².

Source: Anson & Aitchison 2025 (arXiv 2511.21377), lemma 1 and algorithm 1. Not in the paper: biases; and several query
heads that share a key head count by the largest of their sizes. Latent attention, whose parts the paper multiplies by
the norms of all weights before them, is refused: the models here norm their latents.
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
    attention_head_weights,
    attention_layers,
    normed_sides,
    parameter_factors,
    sizes,
)

if TYPE_CHECKING:
    from transformers import Trainer  # slow to import

RATES = "quack_rates"  # in the first parameter group: the initial rates by layer and part
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

    The input counts as constant: the gain and bias of the norm in front of attention, and their steps, are left out.
    `state_dict` holds the initial rates, in its first parameter group; after a state without them is loaded, the next
    step measures them anew.

    Logs a warning for a model with norms of queries or keys, which remove the sizes that the rates depend on.

    Raises ValueError for a model with latent attention or projections of an unknown kind, for an optimiser without
    their weights (as after FSDP1, which flattens them), for a head whose weights are all zero, and for a `tau` that is
    not positive. Source: Anson & Aitchison 2025 (arXiv 2511.21377).
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
        found = attention_layers(model)
        if latent := next((name for name, _, family in found if family.latent), None):
            raise ValueError(f"{latent} caches a latent, for which QuacK has no rates: take QKClip, or a cap (softcap)")
        self.layers = attention_head_weights(model)
        self._own()  # raises without these weights
        if any(normed_sides(layer, family) for _, layer, family in found):
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
            q, k = present["q"], present["k"]
            group = len(q) // len(k)
            now = {"q": 1 / k.repeat_interleave(group), "k": 1 / q.view(-1, group).amax(1)}  # up to a constant
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


def _check_sizes(layer: str, present: ByPart) -> None:
    """Raise ValueError for a head whose queries or keys are zero."""
    for name, outputs in present.items():
        if len(zero := (outputs == 0).nonzero()):
            raise ValueError(
                f"{layer}: the weights {name!r} of head {int(zero[0])} are all zero, and QuacK's learning rates are "
                "relative to their size before the first step: initialise or load them first"
            )
