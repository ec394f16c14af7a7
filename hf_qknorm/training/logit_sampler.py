"""Sample the attention of one training step, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedModel

from hf_qknorm.measure.bounds import largest_gains, logit_bounds
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
MEANS = ("cap", "even", "entropy", "over_cap", "rms_q", "rms_k", "rms_v", "rms_out", "rms_mlp")
SCALARS = ("cap", "even", "rms_out", "rms_mlp")
UNSEEN = {"rms_k": "k_norm", "rms_out": "out", "rms_mlp": "mlp"}  # what a layer may lack, by `LogitStatistics.lengths`


class LogitSampler:
    """Watches the first forward pass of a model in the mode `training`, by default its present mode.

    In training mode, passes without gradients do not count: trainers such as GRPO's generate in it.

    An unpatched model has the scheme "none" until `close()`. Gains and bounds are measured at the start.

    A `compiled` model runs eagerly until `close()`: a compiled program ignores new hooks, and another program would be
    compiled for the sampled steps. Compiled modules in the model are found without the argument.
    """

    def __init__(self, model: Any, rows: int, *, training: bool | None = None, compiled: bool = False) -> None:
        if getattr(model, "tp_size", None) not in (None, 1):
            raise ValueError("LogitMonitor does not support tensor-parallel models: each rank has other heads")
        self.model = model
        self.gradients: dict[str, GradientNorms] = {}
        if training is None:  # a wrapper such as PEFT's may be in another mode than its model
            training = next((m.training for m in model.modules() if isinstance(m, PreTrainedModel)), model.training)
        with ExitStack() as stack:  # removes all hooks if the model is refused
            self.layers = stack.enter_context(watchable_layers(model))
            self.shapes = {name: layer.family.style.heads(layer)[:2] for name, layer in self.layers.items()}
            whole = has_whole_parameters(model)
            self.gains = largest_gains(model) if whole else {}
            self.bounds = logit_bounds(model) if whole else {}
            first = PassFilter(  # no method: a copy of the model would copy the sampler with it
                lambda model: (
                    model.training == training and (torch.is_grad_enabled() or not training) and not self.found
                )
            )
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
        rows = [_packed(self.found.get(name), *shape) for name, shape in self.shapes.items()]
        parameter = next(next(iter(self.layers.values())).parameters())
        device = next((entry.max_logit.device for entry in self.found.values()), parameter.device)
        largest, sums = (torch.cat([row[i].to(device) for row in rows]) for i in (0, 1))
        if world_size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            dist.all_reduce(sums)
        layers: dict[str, LayerStatistics] = {}
        tops = torch.split(largest.cpu(), [len(top) for top, _ in rows])
        totals = torch.split(sums.cpu().double(), [len(numbers) for _, numbers in rows])
        for (name, shape), top, total in zip(self.shapes.items(), tops, totals, strict=True):
            if not (seen := total[0]):
                continue
            means = zip(MEANS, torch.split(total[1:] / seen, _sizes(*shape)), strict=True)
            fields: dict[str, Any] = {m: x.item() if m in SCALARS else tuple(x.tolist()) for m, x in means}
            known = self.found[name].lengths if name in self.found else UNSEEN.values()
            fields |= {field: None for field, part in UNSEEN.items() if part not in known}
            q, k = (None if g is None else tuple(g.tolist()) for g in self.gradients.get(name, (None, None)))
            gain_q, gain_k = self.gains.get(name, (None, None))
            fields |= {"grad_q": q, "grad_k": k, "gain_q": gain_q, "gain_k": gain_k, "bound": self.bounds.get(name)}
            layers[name] = LayerStatistics(tuple(top.tolist()), **fields)
        return LogitSample(step, layers) if layers else None


def _sizes(heads: int, heads_kv: int) -> list[int]:
    """The numbers of each of `MEANS`."""
    return [1 if name in SCALARS else heads_kv if name in ("rms_k", "rms_v") else heads for name in MEANS]


def _packed(entry: LogitStatistics | None, heads: int, heads_kv: int) -> tuple[Tensor, Tensor]:
    """A layer's maxima `[H]`, and the numbers to sum over ranks: 1 if the layer was seen, and the means."""
    if entry is None:  # a layer that was skipped on this rank
        return torch.full((heads,), -1.0), torch.zeros(1 + sum(_sizes(heads, heads_kv)))
    numbers = [entry.even.new_tensor(x) for x in (1.0, entry.cap)] + [getattr(entry, name) for name in MEANS[1:]]
    return entry.max_logit.float(), torch.cat([x.float().flatten() for x in numbers])


def has_whole_parameters(model: nn.Module) -> bool:
    """Whether each parameter is whole, or a DTensor: FSDP1 and ZeRO-3 leave ranks with parts or nothing of it."""
    fsdp1 = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    return not fsdp1 and all(p.numel() for p in model.parameters())


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


def _by_head(parts: Sequence[HeadWeights]) -> Tensor | None:
    norms = [part.norms(part.weight.grad) for part in parts if part.weight.grad is not None]
    return torch.stack(norms).square().sum(0).sqrt() if len(norms) == len(parts) else None


def _of_projections(layer: Any) -> GradientNorms:
    q, *others = (_of_projection(getattr(layer, name, None)) for name in layer.family.style.weights[:2])
    return q, others[0] if others else q


def _of_projection(projection: nn.Module | None) -> Tensor | None:
    if projection is None:  # the layer attends to the keys of another
        return None
    grads = [p.grad for p in projection.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
    return torch.linalg.vector_norm(torch.stack(norms))[None] if norms else None
