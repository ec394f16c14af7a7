"""What the attention logits of a patched model look like, layer by layer and head by head."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_qknorm.attention import QKNormAttention, patched_layers
from hf_qknorm.masks import Structure, structure
from hf_qknorm.ops import tiled

CAP = 50.0  # what logits are held against where no cap is named: the one of Rybakov et al. 2024 and of Gemma 2


@dataclass
class LogitStatistics:
    """What the attention of a layer looked like, per head `[H]`, over all forward passes watched, without padding.

    `max_logit` is the largest |logit| before the cap; `over_half` and `over_cap` are the shares of visible logits over
    `cap`/2 and over `cap`; `entropy` is in nats; `rms_q` `[H]` and `rms_k` `[Hk]` are those of queries and keys as they
    leave the projection, before any norm. Shares and rms are NaN where nothing was seen.
    """

    cap: float
    max_logit: Tensor
    entropies: list[Tensor] = field(default_factory=list)
    counts: Tensor = field(
        default_factory=lambda: torch.zeros((), dtype=torch.int64)
    )  # `[3, H]`: pairs seen, over c/2, over c
    squares: dict[str, Tensor] = field(default_factory=dict)  # "q": `[2, H]`: sum of mean squares, and tokens

    @property
    def entropy(self) -> Tensor:
        """The mean attention entropy per head, each forward pass counting the same."""
        return torch.stack(self.entropies).mean(0)

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
        return (self.squares["q_norm"][0] / self.squares["q_norm"][1]).sqrt()

    @property
    def rms_k(self) -> Tensor:
        """The root mean square of the keys' entries `[Hk]`, before any norm."""
        return (self.squares["k_norm"][0] / self.squares["k_norm"][1]).sqrt()


@contextmanager
def logit_statistics(model: Any, cap: float | None = None) -> Iterator[dict[str, LogitStatistics]]:
    """Watch the logits of every forward pass of a patched model within: layer name → `LogitStatistics`.

    The largest logit is that of scale·q·k where the mask lets it through. No T×S tensor is formed. An unpatched model
    can be watched through the scheme "none", which changes nothing. `cap` is what the logits are held against: by
    default the layer's own cap, or 50 where it has none. It caps nothing.

    Raises ValueError for a model that is not patched.
    """
    layers = patched_layers(model)
    if not layers:
        raise ValueError(f'{type(model).__name__} is not patched: patch_model(model, "none") makes it watchable')
    padding = _Padding()
    collected: dict[str, LogitStatistics] = {}
    with ExitStack() as stack:
        for module in [m for m in model.modules() if isinstance(m, PreTrainedModel)]:
            hook = module.register_forward_pre_hook(padding, with_kwargs=True)
            stack.callback(hook.remove)
        for name, layer in layers.items():
            watcher = _Watcher(name, collected, padding, cap)
            stack.callback(vars(layer).pop, "observer", None)
            layer.observer = watcher
            for norm in ("q_norm", "k_norm"):
                stack.enter_context(_before_norm(layer, norm, watcher))
        yield collected


class _Padding:
    """Reads from the models' own arguments which tokens of the current pass are real."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.signatures: dict[Any, inspect.Signature] = {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if mask is None and args:
            forward = type(module).forward
            signature = self.signatures.setdefault(forward, inspect.signature(forward))
            mask = signature.bind_partial(module, *args).arguments.get("attention_mask")
        # one of four dimensions says who sees whom, and of nobody that it is padding
        self.mask = mask.detach() if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def real(self, length: int, device: torch.device) -> Tensor | None:
        """Which of the last `length` tokens are no padding, `[B, T]`; None if all are."""
        if self.mask is None:
            return None
        real = self.mask[:, -length:].to(device).bool()
        return None if bool(real.all()) else real


class _Watcher:
    """Looks at a layer's queries and keys before their norms, and at its logits: one entry of `collected`."""

    def __init__(self, name: str, collected: dict[str, LogitStatistics], padding: _Padding, cap: float | None) -> None:
        self.name, self.collected, self.padding, self.cap = name, collected, padding, cap
        self.squares: dict[str, Tensor] = {}

    @torch.no_grad()
    def before_norm(self, norm: str, x: Tensor) -> None:
        """Note Σ mean(x²) and the number of tokens, `[2, H]`, of x `[B, T, H, D]`."""
        y = x.detach()
        square = (y if y.dtype == torch.float64 else y.float()).pow(2).mean(-1)
        real = self.padding.real(x.shape[1], x.device)
        weight = torch.ones_like(square) if real is None else real[..., None].to(square.dtype).expand_as(square)
        self.squares[norm] = torch.stack([torch.where(weight > 0, square, 0.0).sum((0, 1)), weight.sum((0, 1))])

    @torch.no_grad()
    def __call__(
        self, layer: QKNormAttention, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]
    ) -> None:
        boundaries = options.get("cu_seq_lens_q")
        seen = structure(layer, q, k, v, mask, options["sliding_window"], options.get("is_causal"), boundaries)
        seen = _without_rows(seen, self.padding.real(q.shape[2], q.device))
        cap = self.cap or layer.softcap or CAP
        found = tiled.statistics(
            q,
            seen.key,
            seen.mask,
            seen.ranges,
            None,
            tiled.Options(options["scaling"], options.get("softcap"), seen.causal, seen.window),
            cap,
        )
        entry = self.collected.setdefault(self.name, LogitStatistics(cap, torch.zeros_like(found.max_logit)))
        entry.max_logit = torch.maximum(entry.max_logit, found.max_logit)
        entry.entropies.append(found.entropy)
        entry.counts = entry.counts.to(q.device) + torch.stack([found.seen, found.over_half, found.over_cap])
        for norm, new in self.squares.items():
            entry.squares[norm] = entry.squares[norm] + new if norm in entry.squares else new


def _without_rows(seen: Structure, real: Tensor | None) -> Structure:
    """The structure without what padding itself attends to, which it may where it stands at the right."""
    if real is None:
        return seen
    if seen.ranges is not None:
        return seen._replace(ranges=seen.ranges.where(real[..., None], 0))
    if seen.mask is None:
        return seen
    rows, mask = real[:, None, :, None], seen.mask
    mask = mask & rows if mask.dtype == torch.bool else mask.masked_fill(~rows, torch.finfo(mask.dtype).min)
    return seen._replace(mask=mask)


@contextmanager
def _before_norm(layer: QKNormAttention, name: str, watcher: _Watcher) -> Iterator[None]:
    """Show the watcher what arrives at the norm `name`, or, by a module that does nothing, where it would stand."""
    absent = layer._modules.get(name) is None
    if absent:
        layer.add_module(name, nn.Identity())

    def look(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        watcher.before_norm(name, arguments[0])

    handle = layer.get_submodule(name).register_forward_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()
        if absent:
            delattr(layer, name)
