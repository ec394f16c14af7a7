"""MuonClip: Muon for the matrices of hidden layers, AdamW for all else, and QK-Clip after each step.

Muon steps along the orthogonalised momentum of a matrix. With Moonlight's factor 0.2·√max(rows, columns) a step has the
size of one of AdamW's, so that learning rate, schedule and weight decay are shared.

Source: Kimi K2 (arXiv 2507.20534), MuonClip with a threshold of 100; Moonlight (arXiv 2502.16982); the step is
`torch.optim.Muon`. Not in the papers: a projection to queries, keys and values at once is orthogonalised in three
parts, as three projections would be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer
from transformers import PreTrainedModel, Trainer
from transformers.pytorch_utils import Conv1D

from hf_qknorm.measure.head_weights import fused_outputs
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.patch import patch_model, unpatch_model
from hf_qknorm.training.clip import QKClip

EXPERTS = ".experts."  # in the names of parameters `[experts, …, …]`, one matrix per expert


class Matrix(NamedTuple):
    """A matrix of weights, its gradient, and Muon's momentum, each `[A, B]`."""

    weight: Tensor
    grad: Tensor
    momentum: Tensor


class MuonClip(Optimizer):
    """An optimiser for the Trainer: Muon and AdamW by one learning rate, and QK-Clip at `threshold` after each step.

    Learning rate, weight decay and AdamW's settings come from `arguments`, and the Trainer makes the schedule:

        >>> from transformers import Trainer, TrainingArguments
        >>> arguments = TrainingArguments(learning_rate=2e-3, weight_decay=0.1, use_cpu=True)
        >>> trainer = Trainer(model, arguments, optimizers=(qk.MuonClip(model, arguments), None))
        >>> [(group["use_muon"], group["lr"], group["weight_decay"]) for group in trainer.optimizer.param_groups]
        [(True, 0.002, 0.1), (False, 0.002, 0.1), (False, 0.002, 0.0)]

    Muon takes the weights of linear layers, and of experts one by one where they are stored as `[experts, …, …]`. AdamW
    takes all else, such as embeddings, the output head, routers that are no linear layers, convolutions, gains and
    biases, with weight decay by the Trainer's rule. A fused projection to queries, keys and values is orthogonalised in
    its three parts; any other matrix, such as `gate_up_proj`, as a whole.

    A model that is not patched gets the scheme "none", which changes no number and lets QK-Clip see the logits. With
    `threshold=None` there is no QK-Clip, as for models whose queries and keys have norms: the size of their logits does
    not depend on the weights' size. `momentum` is Muon's. `clip` is the `QKClip`, and `clip.remove()` ends its watch;
    `clipped` holds the factors of the last step, by layer.

    Works with gradient accumulation, mixed precision and DDP. For FSDP2 the Trainer makes the optimiser itself: patch
    the model, and pass `optimizer_cls_and_kwargs=(lambda: qk.MuonClip, {"arguments": arguments})`.

    Raises TypeError for a model that is not transformers'. Raises ValueError for DeepSpeed, for a model without a
    trainable linear layer, and as `QKClip` does; in the first step for fused projections or experts that are sharded.
    Source: Kimi K2 (arXiv 2507.20534).
    """

    def __init__(self, model: Any, arguments: Any, threshold: float | None = 100.0, momentum: float = 0.95) -> None:
        if getattr(arguments, "deepspeed", None):
            raise ValueError("MuonClip does not support DeepSpeed, whose optimisers split matrices: use DDP or FSDP2")
        decayed = set(Trainer.get_decay_parameter_names(cast(Any, None), model))  # it uses no Trainer
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        matrices = {id(p) for p in hidden_matrices(model)}
        hidden = [p for p in trained.values() if id(p) in matrices]
        if not hidden:
            raise ValueError(f"{type(model).__name__} has no trainable linear layer in its hidden layers for Muon")
        others = {name: p for name, p in trained.items() if id(p) not in matrices}
        settings = {"lr": arguments.learning_rate, "weight_decay": arguments.weight_decay}
        # of the parts only their settings and steps are used: groups and state are this optimiser's
        self.muon = Muon(
            [nn.Parameter(torch.empty(0, 0))], momentum=momentum, adjust_lr_fn="match_rms_adamw", **settings
        )
        betas = (arguments.adam_beta1, arguments.adam_beta2)
        self.adamw = AdamW([torch.empty(0)], betas=betas, eps=arguments.adam_epsilon, **settings)
        plain = [p for name, p in others.items() if name not in decayed]
        groups = [
            {**self.muon.defaults, "use_muon": True, "params": hidden},
            {**self.adamw.defaults, "use_muon": False, "params": [p for name, p in others.items() if name in decayed]},
            {**self.adamw.defaults, "use_muon": False, "params": plain, "weight_decay": 0.0},
        ]
        self.fused = list(fused_outputs(model))
        self.clip = None if threshold is None else _qk_clip(model, threshold)
        self.clipped: dict[str, Tensor] = {}
        super().__init__([group for group in groups if group["params"]], settings)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take both steps, then clip; returns the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step_muon()
        self.adamw.state = self.state
        self.adamw.param_groups = [group for group in self.param_groups if not group["use_muon"]]
        self.adamw.step()
        if self.clip is not None:
            self.clipped = self.clip.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()  # torch's has groups and state alone, and a copy needs the rest

    def _step_muon(self) -> None:
        """Take Muon's step on all matrices; fused projections and experts count as several."""
        fused = {id(projection.weight): (along, outputs) for projection, along, outputs in self.fused}
        groups, copies = [], []
        for group in (group for group in self.param_groups if group["use_muon"]):
            matrices: list[Matrix] = []
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                whole = Matrix(p.detach(), p.grad, state["momentum_buffer"])
                if id(p) not in fused and p.dim() == 2:
                    matrices.append(whole)
                    continue
                if isinstance(p, DTensor):
                    raise ValueError(
                        f"a weight of shape {list(p.shape)} holds several matrices and is sharded, and MuonClip steps "
                        "on each of them by itself: use DDP, or a model with separate projections and no experts"
                    )
                if id(p) not in fused:  # experts: views
                    matrices += (Matrix(*parts) for parts in zip(*(x.unbind() for x in whole), strict=True))
                    continue
                along, outputs = fused[id(p)]
                for rows in (rows.to(p.device) for rows in outputs):
                    copy = Matrix(*(x.index_select(along, rows) for x in whole))
                    copies += [(whole.weight, along, rows, copy.weight), (whole.momentum, along, rows, copy.momentum)]
                    matrices.append(copy)
            for weight, grad, momentum in matrices:
                weight.grad = grad
                self.muon.state[weight] = {"momentum_buffer": momentum}
            groups.append({**group, "params": [matrix.weight for matrix in matrices]})
        self.muon.param_groups = groups
        self.muon.step()  # type: ignore[no-untyped-call]
        for place, along, rows, part in copies:
            place.index_copy_(along, rows, part)
        self.muon.param_groups = []
        self.muon.state.clear()


def _qk_clip(model: Any, threshold: float) -> QKClip:
    """QK-Clip on a model, which gets the scheme "none" if it is not patched, and stays as it is if it is refused."""
    if patched_layers(model):
        return QKClip(model, threshold)
    patch_model(model, "none")
    try:
        return QKClip(model, threshold)
    except ValueError:
        unpatch_model(model)
        raise


def hidden_matrices(model: nn.Module) -> Iterator[Tensor]:
    """Yield the weights of linear layers and of experts in a model's hidden layers.

    Embeddings and the output head are left out, tied or not.
    """
    whole = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if whole is None:
        raise TypeError(f"MuonClip takes a transformers PreTrainedModel, got {type(model).__name__}")
    embeddings = {id(module.weight) for module in whole.modules() if isinstance(module, nn.Embedding)}
    head = whole.get_output_embeddings()
    embeddings |= set() if head is None else {id(p) for p in head.parameters()}
    for module in whole.base_model.modules():
        if isinstance(module, nn.Linear | Conv1D) and id(module.weight) not in embeddings:
            yield module.weight
    for name, parameter in whole.base_model.named_parameters():
        if EXPERTS in name and parameter.dim() == 3:
            yield parameter
