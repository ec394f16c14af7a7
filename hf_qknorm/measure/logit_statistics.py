"""Statistics of the attention logits of a model, by layer and head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_qknorm.files.untrusted import check_positive
from hf_qknorm.measure.logits import call_to_measure, measure
from hf_qknorm.measure.passes import PassFilter
from hf_qknorm.measure.watchable import block_outputs, watchable_layers
from hf_qknorm.model.attention import QKNormAttention, head_norms
from hf_qknorm.model.knees import beyond_knee
from hf_qknorm.model.norms import HeadNorm

NORM_NAMES = ("q_norm", "k_norm", "v_norm")  # of what is measured before its norm
CAP = 50.0  # the default for shares of large logits: the cap of Rybakov et al. 2024 and of Gemma 2


def _computed(compute: Callable[[LogitStatistics], Tensor]) -> Tensor:
    """A read-only attribute, which has the type of its values to type checkers."""
    return property(compute)  # type: ignore[return-value]


@dataclass
class LogitStatistics:
    """Statistics of a layer's attention per head, over all watched forward passes, without padding.

    H is the number of query heads, Hk the number of key heads. Shares and rms are NaN where nothing was seen.

    - `max_logit` `[H]`: the largest |logit| before the cap
    - `over_half`, `over_cap` `[H]`: the shares of visible logits over `cap`/2 and over `cap`, before the cap
    - `entropy` `[H]`: the attention entropy in nats; `even`: the entropy of uniform attention over visible keys, a
      scalar; both are means, in which each forward pass has the same weight
    - `rms_q` `[H]`, `rms_k`, `rms_v` `[Hk]`: the root mean square of queries, keys and values before any norm; `rms_k`
      is NaN in a layer that attends to the keys of another (Gemma 3n); in latent attention `rms_q`, `rms_k` and the
      shares beyond the knee are those of the parts without RoPE
    - `rms_out`, `rms_mlp`: the root mean square, over tokens and channels, of the outputs of the attention's output
      projection and of the MLP's, scalars; of the whole MLP for a mixture of experts. NaN where a model has no MLP
      beside attention (Nemotron-H), or another tool computes the projection without its module
    - `beyond_q` `[H]`, `beyond_k` `[Hk]`: the shares of queries and keys beyond the knee of their norm, that is with a
      mean |x|ᵖ over ε^(p/2); NaN without a knee

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
    counts: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    # by norm ("q_norm", …) `[3, H]`: tokens, the sum of their mean squares, tokens beyond the knee; and
    # by output ("out", "mlp") `[3, 1]`
    lengths: dict[str, Tensor] = field(default_factory=dict)
    evens: list[Tensor] = field(default_factory=list)

    entropy = _computed(lambda self: torch.stack(self.entropies).mean(0))
    even = _computed(lambda self: torch.stack(self.evens).mean())
    over_half = _computed(lambda self: self.counts[1] / self.counts[0])
    over_cap = _computed(lambda self: self.counts[2] / self.counts[0])
    rms_q = _computed(lambda self: self._mean("q_norm", 1, self.max_logit).sqrt())
    rms_v = _computed(lambda self: self._mean("v_norm", 1, self.max_logit).sqrt())
    rms_k = _computed(lambda self: self._mean("k_norm", 1, self.rms_v).sqrt())
    rms_out = _computed(lambda self: self._mean("out", 1, self.max_logit[:1]).sqrt()[0])
    rms_mlp = _computed(lambda self: self._mean("mlp", 1, self.max_logit[:1]).sqrt()[0])
    beyond_q = _computed(lambda self: self._mean("q_norm", 2, self.max_logit))
    beyond_k = _computed(lambda self: self._mean("k_norm", 2, self.rms_v))

    def _mean(self, norm: str, row: int, like: Tensor) -> Tensor:
        if norm not in self.lengths:  # projections of another layout, or an output that was not found
            return torch.full_like(like, torch.nan)
        return self.lengths[norm][row] / self.lengths[norm][0]


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
        for name, layer in layers.items():
            (_hook_projections if layer.has_own_norms else _hook_norms)(layer, watchers[name], stack)
            _hook_outputs(block_outputs(model, name), watchers[name], stack)
            stack.callback(layer.register_forward_pre_hook(watchers[name].begin, with_kwargs=True).remove)
        for undo in passes.observe(model, watchers):
            stack.callback(undo)
        yield collected


class _Watcher:
    """Observes a layer's heads before their norms, and its logits: one entry of `collected`."""

    def __init__(
        self, name: str, collected: dict[str, LogitStatistics], passes: PassFilter, cap: float | None, rows: int | None
    ) -> None:
        self.name, self.collected, self.passes, self.cap, self.rows = name, collected, passes, cap, rows
        self.lengths: dict[str, Tensor] = {}
        self.tokens = (-1, -1)  # of the present pass: sequences, and their length
        self.across = False  # whether the present call is cross-attention

    def begin(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.across = kwargs.get("key_value_states") is not None

    @torch.no_grad()
    def before_norm(self, name: str, x: Tensor, norm: HeadNorm | None = None) -> None:
        """Record the input x `[B, T, H, D]` of the norm with this name: a row of `LogitStatistics.lengths`.

        `norm` is the scheme's norm, if any; it has no knee while it is bypassed.
        """
        if not self.passes.watching:
            return
        y = x.detach()[: self.rows]
        square = (y if y.dtype == torch.float64 else y.float()).pow(2).mean(-1)
        beyond = torch.full_like(square, torch.nan)
        if norm is not None and norm.ratio and not norm.bypass:
            beyond = beyond_knee(norm, y).to(square.dtype)
        real = self.passes.real(self.rows, x.shape[1], x.device, encoder=self.across and name in NORM_NAMES[1:])
        weight = torch.ones_like(square) if real is None else real[..., None].to(square.dtype).expand_as(square)
        values = torch.stack([weight, square, beyond])
        self.lengths[name] = torch.where(weight > 0, values, 0.0).sum((1, 2))

    def output(self, name: str, x: Tensor) -> None:
        """Record an output of the layer's block, behind its attention: `[B, T, C]`, or with its tokens in one row."""
        batch, length = self.tokens
        if not self.passes.watching or self.name not in self.collected or x.shape[:-1].numel() != batch * length:
            return
        self.before_norm(name, x.reshape(batch, length, 1, -1))
        self._keep_lengths()

    @torch.no_grad()
    def __call__(
        self, layer: QKNormAttention, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]
    ) -> None:
        if not self.passes.watching:
            return
        if "v_norm" not in self.lengths and not self.across:  # own norms, or values of another width; not cached ones
            self.before_norm("v_norm", v[:, :, -q.shape[2] :].transpose(1, 2))
        batch, rows, self.tokens = q.shape[0], self.rows, (q.shape[0], q.shape[2])
        q, k = q[:rows], k[:rows]
        mask = mask[:rows] if isinstance(mask, Tensor) and mask.shape[0] == batch else mask
        call = call_to_measure(layer, q, k, mask, options, self.passes.real(rows, q.shape[2], q.device))
        cap = self.cap or layer.softcap or CAP
        found, even = measure(call, cap)
        entry = self.collected.setdefault(self.name, LogitStatistics(cap, torch.zeros_like(found.max_logit)))
        entry.max_logit = torch.maximum(entry.max_logit, found.max_logit)
        entry.entropies.append(found.entropy)
        entry.evens.append(even)
        entry.counts = entry.counts.to(q.device) + torch.stack([found.seen, found.over_half, found.over_cap])
        self._keep_lengths()

    def _keep_lengths(self) -> None:
        kept = self.collected[self.name].lengths
        for name, new in self.lengths.items():
            kept[name] = kept[name] + new if name in kept else new
        self.lengths.clear()


def _hook_norms(layer: QKNormAttention, watcher: _Watcher, stack: ExitStack) -> None:
    """Pass the inputs of the norms to the watcher; an `nn.Identity` stands in for a norm that the layer lacks."""
    for name in NORM_NAMES:
        if layer._modules.get(name) is None:
            layer.add_module(name, nn.Identity())
            stack.callback(delattr, layer, name)

        def look(_: nn.Module, arguments: tuple[Tensor, ...], name: str = name) -> None:
            watcher.before_norm(name, arguments[0], head_norms(layer).get(name))

        stack.callback(layer.get_submodule(name).register_forward_pre_hook(look).remove)


def _hook_projections(layer: QKNormAttention, watcher: _Watcher, stack: ExitStack) -> None:
    """Pass the outputs of separate projections to the watcher, for models with their own norms behind them.

    Of a projection with further outputs (all of q, k and v, or a gate), the inputs `[B, T, H, D]` of the norms.
    """
    heads, heads_kv, head_dim = layer.family.style.heads(layer)
    parts = zip(NORM_NAMES, (heads, heads_kv, heads_kv), layer.family.style.weights, strict=False)
    for name, count, part in parts:
        projection = getattr(layer, part, None)
        if projection is None:  # Gemma 4: a layer that shares another's keys
            continue

        def look(_: nn.Module, __: Any, out: Tensor, name: str = name, width: int = count * head_dim) -> None:
            if out.shape[-1] == width:
                watcher.before_norm(name, out.view(*out.shape[:-1], -1, head_dim))

        stack.callback(projection.register_forward_hook(look).remove)
    for name, own in zip(NORM_NAMES, layer.family.style.own_norms, strict=False):
        norm = layer._modules.get(own)
        if norm is None:
            continue

        def look_before(_: nn.Module, arguments: tuple[Tensor, ...], name: str = name) -> None:
            if name not in watcher.lengths:
                watcher.before_norm(name, arguments[0])

        stack.callback(norm.register_forward_pre_hook(look_before).remove)


def _hook_outputs(modules: Mapping[str, nn.Module], watcher: _Watcher, stack: ExitStack) -> None:
    """Pass the outputs of the block's modules to the watcher."""
    for name, module in modules.items():

        def look(_: nn.Module, __: Any, out: Any, name: str = name) -> None:
            watcher.output(name, out[0] if isinstance(out, tuple) else out)

        stack.callback(module.register_forward_hook(look).remove)
