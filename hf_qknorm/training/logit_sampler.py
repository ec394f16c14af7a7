"""Sample the attention of one training step, over all ranks."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from hf_qknorm.measure.bounds import norm_limits
from hf_qknorm.measure.distributed import world_size
from hf_qknorm.measure.head_weights import HeadWeights, attention_head_weights
from hf_qknorm.measure.logit_statistics import LogitStatistics, watched_layers
from hf_qknorm.measure.passes import PassFilter
from hf_qknorm.measure.watchable import watchable_layers
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.reports.records import LayerStatistics
from hf_qknorm.training.logit_log import LogitSample

GradientNorms = tuple[Tensor | None, Tensor | None]  # of the weights of queries and of keys
QUERIES, KEYS = ("q", "uq", "qr"), ("k", "uk")  # parts of a head; of latent attention, those behind the latent
SCALARS = ("cap", "even")
BY_HEAD = ("entropy", "over_cap")


class LogitSampler:
    """Watches the first forward pass of a model until `close()`: one with gradients, unless it is made without.

    Without gradients are evaluations, and the generations of trainers such as GRPO's.

    An unpatched model has the scheme "none" until then. Gains and bounds are measured at the start.

    A `compiled` model runs eagerly until then: a compiled program ignores new hooks, and another program would be
    compiled for the sampled steps. Compiled modules in the model are found without the argument.
    """

    def __init__(self, model: Any, rows: int, *, compiled: bool = False) -> None:
        if getattr(model, "tp_size", None) not in (None, 1):
            raise ValueError("LogitMonitor does not support tensor-parallel models: each rank has other heads")
        self.model = model
        self.gradients: dict[str, GradientNorms] = {}
        with ExitStack() as stack:  # removes all hooks if the model is refused
            self.layers = stack.enter_context(watchable_layers(model))
            self.heads = {name: layer.family.style.heads(layer)[0] for name, layer in self.layers.items()}
            fsdp1 = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
            whole = not fsdp1 and all(p.numel() for p in model.parameters())  # not parts, or nothing, as under ZeRO-3
            self.limits = norm_limits(model) if whole else {}
            enabled = torch.is_grad_enabled()
            # no method, as a copy of the model would copy the sampler with it
            first = PassFilter(lambda model: torch.is_grad_enabled() is enabled and not self.found)
            self.found = stack.enter_context(watched_layers(model, first, rows=rows))
            modules = list(model.modules())  # compiled in place, or in a wrapper
            if compiled or any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in modules):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            self.close = stack.pop_all().close

    def read_gradients(self) -> None:
        """Record the norms of the present gradients."""
        self.gradients = gradient_norms(self.model)

    def sample(self, step: int) -> LogitSample | None:
        """The sample over all ranks, maxima of logits and means of the rest; None if no pass was seen."""
        rows = [_packed(self.found.get(name), heads) for name, heads in self.heads.items()]
        parameter = next(next(iter(self.layers.values())).parameters())
        device = next((entry.max_logit.device for entry in self.found.values()), parameter.device)
        largest, sums = (torch.cat([row[i].to(device) for row in rows]) for i in (0, 1))
        if world_size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            dist.all_reduce(sums)
        tops = torch.split(largest.cpu(), [len(top) for top, _ in rows])
        totals = torch.split(sums.cpu().double(), [len(numbers) for _, numbers in rows])
        layers = {
            name: self._layer(name, top, total[1:] / total[0])
            for name, top, total in zip(self.heads, tops, totals, strict=True)
            if total[0]
        }
        return LogitSample(step, layers) if layers else None

    def _layer(self, name: str, top: Tensor, means: Tensor) -> LayerStatistics:
        """The statistics of a layer, from maxima `[H]` and the means of `_packed`."""
        scalars, by_head = means[: len(SCALARS)].tolist(), means[len(SCALARS) :].view(len(BY_HEAD), -1).tolist()
        fields: dict[str, Any] = dict(zip(SCALARS, scalars, strict=True))
        fields |= dict(zip(BY_HEAD, map(tuple, by_head), strict=True))
        q, k = (None if g is None else tuple(g.tolist()) for g in self.gradients.get(name, (None, None)))
        fields |= {"grad_q": q, "grad_k": k, **self.limits.get(name, {})}
        return LayerStatistics(tuple(top.tolist()), **fields)


def _packed(entry: LogitStatistics | None, heads: int) -> tuple[Tensor, Tensor]:
    """A layer's maxima `[H]`, and the numbers to sum over ranks: 1 if the layer was seen, and the means."""
    if entry is None:  # a layer that was skipped on this rank
        return torch.full((heads,), -1.0), torch.zeros(1 + len(SCALARS) + len(BY_HEAD) * heads)
    values = [1.0, *(getattr(entry, name) for name in (*SCALARS, *BY_HEAD))]
    numbers = [torch.as_tensor(x, dtype=torch.float32, device=entry.max_logit.device).flatten() for x in values]
    return entry.max_logit.float(), torch.cat(numbers)


@torch.no_grad()
def gradient_norms(model: Any) -> dict[str, GradientNorms]:
    """By layer of a patched model, the norms of the present gradients of the weights of queries and of keys.

    One number per head, `[H]` and `[Hk]`, without biases. Where heads are not separate, as with adapters, one number
    `[1]` for the projection's trained weights. None without a gradient.
    """
    try:
        layers = attention_head_weights(model)
    except ValueError:  # not all projections hold a plain weight
        return {name: _of_projections(layer) for name, layer in patched_layers(model).items()}
    return {
        name: (_by_head([parts[n] for n in QUERIES if n in parts]), _by_head([parts[n] for n in KEYS if n in parts]))
        for name, parts in layers.items()
    }


def _by_head(parts: list[HeadWeights]) -> Tensor | None:
    norms = [part.norms(part.weight.grad) for part in parts if part.weight.grad is not None]
    return torch.stack(norms).square().sum(0).sqrt() if len(norms) == len(parts) else None


def _of_projections(layer: Any) -> GradientNorms:
    q, k, *_ = (*(_of_projection(getattr(layer, name, None)) for name in layer.family.style.weights[:2]), None)
    return q, q if len(layer.family.style.weights) == 1 else k


def _of_projection(projection: nn.Module | None) -> Tensor | None:
    grads = [p.grad for p in projection.parameters() if p.grad is not None] if projection is not None else []
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
    return torch.linalg.vector_norm(torch.stack(norms))[None] if norms else None
