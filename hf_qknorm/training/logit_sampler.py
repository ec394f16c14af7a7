"""One sampled step: what is put on the model meanwhile, and the sample that all ranks make of it together."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_qknorm.model.attention import patched_layers
from hf_qknorm.stats.logit_statistics import FirstPassFilter, LogitStatistics, watched_layers
from hf_qknorm.training.grad_norms import GradientNorms, gradient_norms
from hf_qknorm.training.logit_log import LayerSample, LogitSample

MEANS = ("entropy", "over_cap", "rms_q", "rms_k", "rms_v")


class LogitSampler:
    """Watches the first pass of a patched model in training mode, or not, as `training` says, until it is closed.

    None: in the mode that the model is in now. A `compiled` model, if it is not known to be one itself, runs eagerly
    meanwhile: hooks put on a traced model would be passed over, and a trace with them made for a step in ten.
    """

    def __init__(self, model: Any, rows: int, *, training: bool | None = None, compiled: bool = False) -> None:
        if getattr(model, "tp_size", None) not in (None, 1):
            raise ValueError("LogitMonitor can't watch a tensor-parallel model: each rank has other heads")
        self.model, self.layers = model, patched_layers(model)
        self.gradients: dict[str, GradientNorms] = {}
        self._stack = ExitStack()
        self._compiled = compiled or _is_compiled(model)
        if training is None:  # a wrapper such as PEFT's may be in another mode than its model
            training = next((m.training for m in model.modules() if isinstance(m, PreTrainedModel)), model.training)
        self._watched = watched_layers(model, FirstPassFilter(training), rows=rows)

    def __enter__(self) -> LogitSampler:
        with ExitStack() as stack:  # undone at once if the model is refused
            self.found: dict[str, LogitStatistics] = stack.enter_context(self._watched)
            if self._compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take everything off the model again."""
        self._stack.close()

    def read_gradients(self) -> None:
        """Note the gradients as they are now."""
        self.gradients = gradient_norms(self.model)

    def sample(self, step: int) -> LogitSample | None:
        """What was seen, over all ranks: maxima of logits, means of the rest; None if nothing was."""
        shapes = {name: layer.family.style.heads(layer)[:2] for name, layer in self.layers.items()}
        rows = [_packed(self.found.get(name), *shape) for name, shape in shapes.items()]
        device = next((entry.max_logit.device for entry in self.found.values()), _device(self.layers))
        largest, sums = (torch.cat([row[i].to(device) for row in rows]) for i in (0, 1))
        if _ranks() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            dist.all_reduce(sums)
        layers: dict[str, LayerSample] = {}
        maxima, totals = iter(largest.tolist()), iter(sums.tolist())
        for name, (heads, heads_kv) in shapes.items():
            top = tuple(next(maxima) for _ in range(heads))
            seen, cap, even = (next(totals) for _ in range(3))
            sizes = (heads, heads, heads, heads_kv, heads_kv)
            means = {m: tuple(next(totals) / max(seen, 1) for _ in range(n)) for m, n in zip(MEANS, sizes, strict=True)}
            if seen:
                q, k = (None if g is None else tuple(g.tolist()) for g in self.gradients.get(name, (None, None)))
                layers[name] = LayerSample(cap / seen, even / seen, top, **means, grad_q=q, grad_k=k)
        return LogitSample(step, layers) if layers else None


def is_first_rank() -> bool:
    """Whether this process writes and warns for all."""
    return _ranks() == 1 or dist.get_rank() == 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _packed(entry: LogitStatistics | None, heads: int, heads_kv: int) -> tuple[Tensor, Tensor]:
    """A layer's maxima `[H]`, and what is summed over the ranks, the number of those that saw it first."""
    if entry is None:  # a layer that was left out has its place all the same
        return torch.full((heads,), -1.0), torch.zeros(3 + 3 * heads + 2 * heads_kv)
    means = [getattr(entry, name).float() for name in MEANS]
    numbers = torch.stack([entry.even.new_tensor(1.0), entry.even.new_tensor(entry.cap), entry.even])
    return entry.max_logit.float(), torch.cat([numbers.float(), *means])


def _device(layers: dict[str, Any]) -> torch.device:
    return next(next(iter(layers.values())).parameters()).device


def _is_compiled(model: nn.Module) -> bool:
    return any(
        module._compiled_call_impl is not None or hasattr(module, "_orig_mod")  # in place, or in a wrapper
        for module in model.modules()
    )
