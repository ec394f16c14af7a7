"""Statistics of the attention logits of a model, by layer and head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_qknorm.families import REFUSED, family_of
from hf_qknorm.files.untrusted import check_positive
from hf_qknorm.measure.logits import call_to_measure, measure
from hf_qknorm.model.attention import QKNormAttention, patched_layers
from hf_qknorm.model.install import install, own_layers, require_own_forward, uninstall
from hf_qknorm.model.passes import PassFilter
from hf_qknorm.scheme import SCHEMES

CAP = 50.0  # the default for shares of large logits: the cap of Rybakov et al. 2024 and of Gemma 2


def _computed(compute: Callable[[LogitStatistics], Tensor]) -> Tensor:
    """A read-only attribute, which has the type of its values to type checkers."""
    return property(compute)  # type: ignore[return-value]


@dataclass
class LogitStatistics:
    """Statistics of a layer's attention per head `[H]`, over all watched forward passes, without padding.

    - `max_logit` `[H]`: the largest |logit| before the cap
    - `over_half`, `over_cap` `[H]`: the shares of visible logits over `cap`/2 and over `cap`, before the cap
    - `entropy` `[H]`: the attention entropy in nats; `even`: the entropy of uniform attention over visible keys, a
      scalar; both are means, in which each forward pass has the same weight

        >>> with qk.logit_statistics(qk.patch_model(model, "qk_norm_cap")) as statistics:
        ...     _ = model(torch.arange(8)[None])
        >>> first = next(iter(statistics.values()))
        >>> first.cap, first.max_logit.shape == first.entropy.shape
        (50.0, True)
    """

    cap: float
    max_logit: Tensor
    entropies: list[Tensor] = field(default_factory=list)
    # `[3, H]`: visible logits, those over cap/2, those over the cap
    counts: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64, device="cpu"))
    evens: list[Tensor] = field(default_factory=list)

    entropy = _computed(lambda self: torch.stack(self.entropies).mean(0))
    even = _computed(lambda self: torch.stack(self.evens).mean())
    over_half = _computed(lambda self: self.counts[1] / self.counts[0])
    over_cap = _computed(lambda self: self.counts[2] / self.counts[0])


def logit_statistics(model: Any, cap: float | None = None) -> AbstractContextManager[dict[str, LogitStatistics]]:
    """Collect statistics of the logits in every forward pass inside the block: layer name → `LogitStatistics`.

    Logits are scale·q·k where the mask lets k be seen; no T×S tensor is formed. `cap` is the reference for shares of
    large logits and caps nothing: by default the layer's own cap, or 50 without one. The model may be patched or not.

        >>> with qk.logit_statistics(model) as statistics:
        ...     _ = model(torch.arange(8)[None])
        >>> bool(max(layer.max_logit.max() for layer in statistics.values()) > 0)
        True

    Raises ValueError for a model without an attention layer of a known family, and a cap that is not finite and > 0.
    """
    return watched_layers(model, PassFilter(), None if cap is None else check_positive(cap, "cap"))


@contextmanager
def watched_layers(
    model: Any, passes: PassFilter, cap: float | None = None, rows: int | None = None
) -> Iterator[dict[str, LogitStatistics]]:
    """`logit_statistics` of the forward passes that `passes` selects, and of their first `rows` sequences."""
    collected: dict[str, LogitStatistics] = {}
    with ExitStack() as stack:
        layers = stack.enter_context(watchable_layers(model))
        watchers = {name: _Watcher(name, collected, passes, cap, rows) for name in layers}
        for undo in passes.observe(model, watchers):
            stack.callback(undo)
        yield collected


@dataclass(eq=False)
class _Watcher:
    """Observes the logits of the layer `name`: one entry of `collected`."""

    name: str
    collected: dict[str, LogitStatistics]
    passes: PassFilter
    cap: float | None
    rows: int | None

    @torch.no_grad()
    def __call__(
        self, layer: QKNormAttention, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]
    ) -> None:
        if not self.passes.watching:
            return
        rows, cap = self.rows, self.cap or layer.softcap or CAP
        mask = mask[:rows] if isinstance(mask, Tensor) and len(mask) == len(q) else mask
        call = call_to_measure(layer, q[:rows], k[:rows], mask, options, self.passes.real(rows, q, k, mask))
        found, even = measure(call, cap)
        entry = self.collected.setdefault(self.name, LogitStatistics(cap, torch.zeros_like(found.max_logit)))
        entry.max_logit = torch.maximum(entry.max_logit, found.max_logit)
        entry.entropies.append(found.entropy)
        entry.evens.append(even)
        entry.counts = entry.counts.to(q.device) + torch.stack([found.seen, found.over_half, found.over_cap])


@contextmanager
def watchable_layers(model: Any) -> Iterator[dict[str, QKNormAttention]]:
    """The attention modules of `model` by name; in an unpatched model they have the scheme "none" inside the block.

    "none" changes no number. Unlike `patch_model` this leaves the model's class and config alone, and reaches into
    wrappers such as DDP's and PEFT's. After the block the modules are as before.

    Raises ValueError for a model without an attention module of a known family, or with one whose forward another tool
    has replaced.
    """
    with ExitStack() as stack:
        for module in () if patched_layers(model) else list(model.modules()):
            if isinstance(module, PreTrainedModel) and module.config.model_type not in REFUSED:
                family = family_of(module.config)
                if own_layers(module, family):
                    require_own_forward(module, family)
                    stack.callback(uninstall, module)
                    install(module, family, SCHEMES["none"])
        layers = patched_layers(model)
        if not layers:
            raise ValueError(
                f"{type(model).__name__} has no attention module of a known family, whose logits could be watched: "
                "see hf-qknorm families"
            )
        yield layers
