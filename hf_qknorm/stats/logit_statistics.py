"""What the attention logits of a patched model look like, layer by layer and head by head."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_qknorm.model.attention import NORM_NAMES, QKNormAttention, head_norms, patched_layers
from hf_qknorm.model.knees import beyond_knee
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.stats.logits import measure, visible_keys
from hf_qknorm.stats.observers import add_observer, remove_observer

CAP = 50.0  # what logits are held against where no cap is named: the one of Rybakov et al. 2024 and of Gemma 2


@dataclass
class LogitStatistics:
    """What the attention of a layer looked like, per head `[H]`, over all forward passes watched, without padding.

    `max_logit` is the largest |logit| before the cap; `over_half` and `over_cap` are the shares of visible logits over
    `cap`/2 and over `cap`; `entropy` is in nats; `rms_q` `[H]` and `rms_k` `[Hk]` are those of queries and keys as they
    leave the projection, before any norm, `rms_v` `[Hk]` that of the values. `beyond_q` `[H]` and `beyond_k` `[Hk]` are
    the shares of them that are beyond the knee of their norm. `even` is the entropy that attention which is the same
    for all keys in sight would have. Shares and rms are NaN where nothing was seen, or there is no knee.
    """

    cap: float
    max_logit: Tensor
    entropies: list[Tensor] = field(default_factory=list)
    counts: Tensor = field(
        default_factory=lambda: torch.zeros((), dtype=torch.int64)
    )  # `[3, H]`: pairs seen, over c/2, over c
    # "q_norm": `[3, H]`: tokens, the sum of their mean squares, and how many are beyond the knee
    lengths: dict[str, Tensor] = field(default_factory=dict)
    evens: list[Tensor] = field(default_factory=list)

    @property
    def entropy(self) -> Tensor:
        """The mean attention entropy per head, each forward pass counting the same."""
        return torch.stack(self.entropies).mean(0)

    @property
    def even(self) -> Tensor:
        """The entropy of even attention, a number, each forward pass counting the same."""
        return torch.stack(self.evens).mean()

    @property
    def over_half(self) -> Tensor:
        """The share of visible logits, before the cap, whose size is over half the cap."""
        return self.counts[1] / self.counts[0]

    @property
    def over_cap(self) -> Tensor:
        """The share of visible logits, before the cap, whose size is over the cap."""
        return self.counts[2] / self.counts[0]

    @property
    def rms_q(self) -> Tensor:
        """The root mean square of the queries' entries, before any norm."""
        return self._rms("q_norm", self.max_logit)

    @property
    def rms_k(self) -> Tensor:
        """The root mean square of the keys' entries `[Hk]`, before any norm."""
        return self._rms("k_norm", self.rms_v)

    @property
    def rms_v(self) -> Tensor:
        """The root mean square of the values' entries `[Hk]`, before any norm."""
        return self._rms("v_norm", self.max_logit)

    @property
    def beyond_q(self) -> Tensor:
        """The share of queries whose mean |x|ᵖ is larger than the ε^(p/2) of their norm, which has a knee."""
        return self._mean("q_norm", 2, self.max_logit)

    @property
    def beyond_k(self) -> Tensor:
        """The share of keys `[Hk]` whose mean |x|ᵖ is larger than the ε^(p/2) of their norm, which has a knee."""
        return self._mean("k_norm", 2, self.rms_v)

    def _rms(self, norm: str, like: Tensor) -> Tensor:
        return self._mean(norm, 1, like).sqrt()

    def _mean(self, norm: str, row: int, like: Tensor) -> Tensor:
        if norm not in self.lengths:  # the model has norms of its own, and projects in a way of its own
            return torch.full_like(like, torch.nan)
        return self.lengths[norm][row] / self.lengths[norm][0]


@contextmanager
def logit_statistics(model: Any, cap: float | None = None) -> Iterator[dict[str, LogitStatistics]]:
    """Watch the logits of every forward pass of a patched model within: layer name → `LogitStatistics`.

    The largest logit is that of scale·q·k where the mask lets it through. No T×S tensor is formed. An unpatched model
    can be watched through the scheme "none", which changes nothing. `cap` is what the logits are held against: by
    default the layer's own cap, or 50 where it has none. It caps nothing.

    Raises ValueError for a model that is not patched.
    """
    with watched_layers(model, PassFilter(), cap) as collected:
        yield collected


@contextmanager
def watched_layers(
    model: Any, passes: PassFilter, cap: float | None = None, rows: int | None = None
) -> Iterator[dict[str, LogitStatistics]]:
    """`logit_statistics` of the forward passes that `passes` lets through, and of their first `rows` sequences."""
    layers = patched_layers(model)
    if not layers:
        raise ValueError(f'{type(model).__name__} is not patched: patch_model(model, "none") makes it watchable')
    collected: dict[str, LogitStatistics] = {}
    with ExitStack() as stack:
        for module in [m for m in model.modules() if isinstance(m, PreTrainedModel)]:
            stack.callback(module.register_forward_pre_hook(passes.enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(passes.leave, always_call=True).remove)
        for name, layer in layers.items():
            watcher = _Watcher(name, collected, passes, cap, rows)
            stack.callback(remove_observer, layer, watcher)
            add_observer(layer, watcher)
            look = _behind_projections if layer.has_own_norms else _before_norms
            stack.enter_context(look(layer, watcher))
        stack.callback(passes.end)
        yield collected


class PassFilter:
    """Which forward passes are watched, here all, and which of their tokens are real, as the models' arguments say."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.signatures: dict[Any, inspect.Signature] = {}
        self.watching = True

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if mask is None and args:
            forward = type(module).forward
            signature = self.signatures.setdefault(forward, inspect.signature(forward))
            mask = signature.bind_partial(module, *args).arguments.get("attention_mask")
        # one of four dimensions says who sees whom, and of nobody that it is padding
        self.mask = mask.detach() if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A model is done."""

    def end(self) -> None:
        """Watch no more, even if another observer still passes on what it sees."""
        self.watching = False

    def real(self, rows: int | None, length: int, device: torch.device) -> Tensor | None:
        """Which of the last `length` tokens of the first `rows` sequences are no padding, `[B, T]`; None if all are."""
        if self.mask is None:
            return None
        real = self.mask[:rows, -length:].to(device).bool()
        return None if bool(real.all()) else real


class FirstPassFilter(PassFilter):
    """The first pass alone, of those with the model in training mode, or not, as `training` says.

    A model may call others within: the pass is over when the outermost one is done. What gradient checkpointing
    computes again in the backward pass is layers alone, outside of any pass.
    """

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.training, self.depth, self.over = training, 0, False
        self.watching = False

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.depth += 1
        self.watching = self.watching or (self.depth == 1 and not self.over and module.training == self.training)
        if self.watching:
            super().enter(module, args, kwargs)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.depth -= 1
        if self.depth == 0 and self.watching:
            self.watching, self.over = False, True


class _Watcher:
    """Looks at a layer's heads before their norms, and at its logits: one entry of `collected`."""

    def __init__(
        self, name: str, collected: dict[str, LogitStatistics], passes: PassFilter, cap: float | None, rows: int | None
    ) -> None:
        self.name, self.collected, self.passes, self.cap, self.rows = name, collected, passes, cap, rows
        self.before: Callable[..., None] | None = None
        self.lengths: dict[str, Tensor] = {}

    @torch.no_grad()
    def before_norm(self, name: str, x: Tensor, norm: HeadNorm | None = None) -> None:
        """Note what the norm of that name is given, x `[B, T, H, D]`: a row of `LogitStatistics.lengths`.

        `norm` is the scheme's, if it has put one there; it has no knee while it is bypassed.
        """
        if not self.passes.watching:
            return
        y = x.detach()[: self.rows]
        square = (y if y.dtype == torch.float64 else y.float()).pow(2).mean(-1)
        beyond = torch.full_like(square, torch.nan)
        if norm is not None and norm.knee and not norm.bypass:
            beyond = beyond_knee(norm, y).to(square.dtype)
        real = self.passes.real(self.rows, x.shape[1], x.device)
        weight = torch.ones_like(square) if real is None else real[..., None].to(square.dtype).expand_as(square)
        values = torch.stack([weight, square, beyond])
        self.lengths[name] = torch.where(weight > 0, values, 0.0).sum((1, 2))

    @torch.no_grad()
    def __call__(
        self, layer: QKNormAttention, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]
    ) -> None:
        if self.before is not None:
            self.before(layer, q, k, v, mask, options)
        if not self.passes.watching:
            return
        if "v_norm" not in self.lengths:  # as in a model with norms of its own whose values are of another width
            self.before_norm("v_norm", v[:, :, -q.shape[2] :].transpose(1, 2))
        batch, rows = q.shape[0], self.rows
        q, k = q[:rows], k[:rows]
        mask = mask[:rows] if isinstance(mask, Tensor) and mask.shape[0] == batch else mask
        seen = visible_keys(layer, q, k, mask, options, self.passes.real(rows, q.shape[2], q.device))
        cap = self.cap or layer.softcap or CAP
        found, even = measure(q, seen, options["scaling"], options.get("softcap"), cap)
        entry = self.collected.setdefault(self.name, LogitStatistics(cap, torch.zeros_like(found.max_logit)))
        entry.max_logit = torch.maximum(entry.max_logit, found.max_logit)
        entry.entropies.append(found.entropy)
        entry.evens.append(even)
        entry.counts = entry.counts.to(q.device) + torch.stack([found.seen, found.over_half, found.over_cap])
        for name, new in self.lengths.items():
            entry.lengths[name] = entry.lengths[name] + new if name in entry.lengths else new
        self.lengths.clear()


@contextmanager
def _before_norms(layer: QKNormAttention, watcher: _Watcher) -> Iterator[None]:
    """Show the watcher what arrives at the norms, or, by modules that do nothing, where they would stand."""
    with ExitStack() as stack:
        for name in NORM_NAMES.values():
            if layer._modules.get(name) is None:
                layer.add_module(name, nn.Identity())
                stack.callback(delattr, layer, name)

            def look(_: nn.Module, arguments: tuple[Tensor, ...], name: str = name) -> None:
                watcher.before_norm(name, arguments[0], head_norms(layer).get(name))

            stack.callback(layer.get_submodule(name).register_forward_pre_hook(look).remove)
        yield


@contextmanager
def _behind_projections(layer: QKNormAttention, watcher: _Watcher) -> Iterator[None]:
    """Show the watcher what separate projections give: the model's own norms behind them stand anywhere."""
    heads, heads_kv, head_dim = layer.family.style.heads(layer)
    widths, parts = (heads * head_dim, heads_kv * head_dim, heads_kv * head_dim), layer.family.style.weights
    with ExitStack() as stack:
        for name, width, part in zip(NORM_NAMES.values(), widths, parts, strict=False):

            def look(_: nn.Module, __: Any, out: Tensor, name: str = name, width: int = width) -> None:
                if out.shape[-1] == width:
                    watcher.before_norm(name, out.view(*out.shape[:-1], -1, head_dim))

            stack.callback(layer.get_submodule(part).register_forward_hook(look).remove)
        yield
