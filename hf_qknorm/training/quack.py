"""QuacK: per-head learning rates of queries and keys that fall as the weights on the other side grow.

The size of W_K bounds how much a step of W_Q changes a logit, and the other way round. Each head's steps are therefore
scaled by τ·‖W_K‖₀/‖W_K‖ and τ·‖W_Q‖₀/‖W_Q‖, with ‖·‖ the Frobenius norm of the head's weights, and ‖·‖₀ that norm
before the first step. The model itself is not changed.

Source: Anson & Aitchison 2025 (arXiv 2511.21377), algorithm 1, and algorithm 2 for multi-head latent attention. Not in
the paper: several query heads that share a key head count by the largest of their norms. A bias has the factor of its
weight, because it meets the same weights on the other side; norms are those of weights alone, as published, because
weights and biases multiply inputs of different size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_qknorm.files.untrusted import check_positive
from hf_qknorm.training.head_weights import attention_head_weights, parameter_factors

if TYPE_CHECKING:
    from transformers import Trainer  # slow to import

PREFIX = "quack_"  # of the initial norms in a parameter's state
PartNorms = dict[str, Tensor]  # part name → `[heads]`


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
    `state_dict` holds the initial norms; after a state without them is loaded, the next step measures them anew.

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
        self.first: dict[tuple[str, str], Tensor] = {}  # initial norms by layer and part
        self._own()  # raises without these weights
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
        """The Trainer's optimiser: that of a run before, or the one that `create` makes, wrapped."""
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
        """The wrapped optimiser's state, with the initial norms in the state of their parameters."""
        state: dict[str, Any] = self.optimizer.state_dict()
        entries = dict(state["state"])
        for index, layer, name in self._numbered(state):
            if (layer, name) in self.first:
                entries[index] = {**entries.get(index, {}), PREFIX + name: self.first[layer, name]}
        return {**state, "state": entries}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; without initial norms in it, the next step's norms are the initial ones."""
        entries = state_dict["state"]
        self.first = {
            (layer, name): entries[index][PREFIX + name].to(self.layers[layer][name].weight.device)
            for index, layer, name in self._numbered(state_dict)
            if PREFIX + name in entries.get(index, {})
        }
        plain = {
            index: {key: value for key, value in entry.items() if not str(key).startswith(PREFIX)}
            for index, entry in entries.items()
        }
        self.optimizer.load_state_dict({**state_dict, "state": {i: entry for i, entry in plain.items() if entry}})

    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()

    def _scales(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the weights and biases of projections with the factors of their steps, which broadcast."""
        for layer, parts in self.layers.items():
            norms = {name: part.norms() for name, part in parts.items()}
            for name, norm in norms.items():
                if (layer, name) in self.first:
                    continue
                if len(zero := (norm == 0).nonzero()):
                    raise ValueError(
                        f"{layer}: the weights {name!r} of head {int(zero[0])} are all zero, and QuacK's learning "
                        "rates are relative to their norm before the first step: initialise or load them first"
                    )
                self.first[layer, name] = norm
            now, first = (learning_rates(x) for x in (norms, {name: self.first[layer, name] for name in parts}))
            yield from parameter_factors(parts, {name: self.tau * (now[name] / first[name]) for name in parts})

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


def learning_rates(norms: PartNorms) -> PartNorms:
    """The learning rates of a layer's parts up to a constant, `[heads]`, from the norms of the parts."""
    if "q" not in norms:
        return _latent_rates(norms)
    q, k = norms["q"], norms["k"]
    group = len(q) // len(k)
    return {"q": 1 / k.repeat_interleave(group), "k": 1 / q.view(-1, group).amax(1)}


def _latent_rates(norms: PartNorms) -> PartNorms:
    """Algorithm 2, with ‖W_dq‖ = 1 for queries without a latent."""
    uq, qr, uk, kr, dkv = (norms[name] for name in ("uq", "qr", "uk", "kr", "dkv"))
    dq = norms.get("dq", torch.ones_like(dkv))
    plain, rotated = (uq * uk).amax(0, keepdim=True), qr.amax(0, keepdim=True)
    factors = {
        "uq": 1 / (dq * uk * dkv),
        "uk": 1 / (uq * dq * dkv),
        "qr": 1 / (dq * kr).expand_as(qr),
        "dkv": 1 / (plain * dq),
        "kr": 1 / (rotated * dq),
        "dq": torch.minimum(1 / (plain * dkv), 1 / (rotated * kr)),
    }
    return {name: factors[name] for name in norms}
