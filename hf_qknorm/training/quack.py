"""QuacK: learning rates of queries and keys that fall as the weights on the other side grow, by head.

What a step of W_Q changes in a logit is bounded by the size of W_K, and the other way round; so each head's steps are
taken as τ·‖W_K‖₀/‖W_K‖ and τ·‖W_Q‖₀/‖W_Q‖ of what they would be, with ‖·‖ the Frobenius norm of the head's weights and
‖·‖₀ what it was before the first step. Nothing in the model changes.

Source: Anson & Aitchison 2025 (arXiv 2511.21377), algorithm 1, and algorithm 2 for multi-head latent attention. Ours,
where it is silent: a key head that several query heads share goes by the largest of their norms. A bias steps as its
weight does, because it meets the same weights on the other side; norms are of weights alone, as published, because
weights and biases multiply inputs of different size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_qknorm.files.untrusted import positive
from hf_qknorm.training.head_weights import along_outputs, attention_head_weights, by_projection

PREFIX = "quack_"  # of the first norms in a parameter's state
PartNorms = dict[str, Tensor]  # part name → `[heads]`


class QuacK(Optimizer):
    """Any optimiser, with its steps on queries and keys scaled by head: `QuacK(AdamW(model.parameters()), model)`.

    It is the optimiser for schedulers, gradient scalers and the Trainer: `Trainer(…, optimizers=(QuacK(…), None))`.
    The model may be patched or not, sharded by FSDP2 before or after. `tau` (default 1) scales all these steps.

    The whole step is scaled, a decoupled weight decay with it: under SGD, AdamW and Muon it is the one that a learning
    rate of the head's own would make. Old weights of queries and keys (where they are fused, of values too) are kept
    while the optimiser steps: for an 8B Llama in bfloat16 1.3 GB. An optimiser that keeps weights of its own (fp32
    masters, a slow copy) would undo the scaling. `state_dict` holds the first norms; a state without them starts anew.

    Raises ValueError for a model whose heads can't be told, for an optimiser that has none of their weights (as after
    FSDP1, which flattens them), for a head whose weights are all zero, and for a `tau` that is not positive.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, tau: float = 1.0) -> None:
        self.optimizer, self.tau = optimizer, positive(tau, "tau")
        self.layers = attention_head_weights(model)
        self.first: dict[tuple[str, str], Tensor] = {}  # by layer and part
        self._require_own()
        super().__setstate__({})  # hooks and profiling, without parameters of its own

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimiser's step, scaled by head; returns what it returns."""
        with torch.no_grad():
            scales = list(self._scales())
            own = {id(p) for group in self.param_groups for p in group["params"]}
            moved = {  # by identity: layers may share weights
                id(p): (p, p.detach().clone(), vector, projection)
                for projection, vector in scales
                for p in projection.parameters(recurse=False)
                if id(p) in own
            }
        loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        with torch.no_grad():
            for p, old, vector, projection in moved.values():
                rest = (p.to(vector.dtype) - old) * along_outputs(vector - 1, projection, p)
                p.copy_(p + rest)  # nothing, to the bit, where the scale is 1
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's, with the first norms in the state of their parameters."""
        state: dict[str, Any] = self.optimizer.state_dict()
        entries = dict(state["state"])
        for index, layer, name in self._numbered(state):
            if (layer, name) in self.first:
                entries[index] = {**entries.get(index, {}), PREFIX + name: self.first[layer, name]}
        return {**state, "state": entries}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; from a state without first norms, those of the next step are the first."""
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
        self.optimizer.load_state_dict(
            {**state_dict, "state": {index: entry for index, entry in plain.items() if entry}}
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        return self.optimizer.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()

    def _scales(self) -> Iterator[tuple[Any, Tensor]]:
        """Each projection with the factor of its outputs' steps `[out]`."""
        if not self.first:
            self._require_own()
        for layer, parts in self.layers.items():
            norms = {name: part.norms() for name, part in parts.items()}
            for name, norm in norms.items():
                if (layer, name) not in self.first:
                    self.first[layer, name] = _checked(norm, layer, name)
            now, first = (rule(x) for x in (norms, {name: self.first[layer, name] for name in parts}))
            yield from by_projection(parts, {name: self.tau * (now[name] / first[name]) for name in parts})

    def _numbered(self, state_dict: dict[str, Any]) -> Iterator[tuple[Any, str, str]]:
        """The number in `state_dict` of the weight of each part that the optimiser has, with its layer and name."""
        groups = zip(self.param_groups, state_dict["param_groups"], strict=True)
        numbers = {id(p): n for own, saved in groups for p, n in zip(own["params"], saved["params"], strict=True)}
        for layer, parts in self.layers.items():
            for name, part in parts.items():
                if id(part.weight) in numbers:
                    yield numbers[id(part.weight)], layer, name

    def _require_own(self) -> None:
        own = {id(p) for group in self.param_groups for p in group["params"]}
        if not any(id(part.weight) in own for parts in self.layers.values() for part in parts.values()):
            raise ValueError(
                f"the {type(self.optimizer).__name__} has none of the weights of queries and keys of this model: make "
                "it of model.parameters(), and shard the model, if at all, by FSDP2 (fully_shard)"
            )


def rule(norms: PartNorms) -> PartNorms:
    """What the learning rate of each part is proportional to, given the norms of the parts of a layer `[heads]`."""
    return _separate_rule(norms) if "q" in norms else _latent_rule(norms)


def _separate_rule(norms: PartNorms) -> PartNorms:
    q, k = norms["q"], norms["k"]
    group = len(q) // len(k)
    return {"q": 1 / k.repeat_interleave(group), "k": 1 / q.view(-1, group).amax(1)}


def _latent_rule(norms: PartNorms) -> PartNorms:
    """Algorithm 2, with ‖W_dq‖ = 1 where queries come without a latent."""
    uq, qr, uk, kr, dkv = (norms[name] for name in ("uq", "qr", "uk", "kr", "dkv"))
    dq = norms.get("dq", torch.ones_like(dkv))
    plain, turned = (uq * uk).amax(0, keepdim=True), qr.amax(0, keepdim=True)
    factors = {
        "uq": 1 / (dq * uk * dkv),
        "uk": 1 / (uq * dq * dkv),
        "qr": 1 / (dq * kr).expand_as(qr),
        "dkv": 1 / (plain * dq),
        "kr": 1 / (turned * dq),
        "dq": torch.minimum(1 / (plain * dkv), 1 / (turned * kr)),
    }
    return {name: factors[name] for name in norms}


def _checked(norm: Tensor, layer: str, name: str) -> Tensor:
    zero = (norm == 0).nonzero()
    if len(zero):
        raise ValueError(
            f"{layer}: the weights {name!r} of head {int(zero[0])} are all zero, and QuacK's learning rates are "
            "relative to what they are before the first step: initialise them, or load them, first"
        )
    return norm
