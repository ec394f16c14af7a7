"""QK-Clip: after the optimiser's step, heads whose logits passed a threshold get smaller weights.

A head whose largest logit in the step's forward passes was m > threshold t gets W_q and W_k times √(t/m) each, biases
too, because q·k is of first order in both: for the same input its largest logit is t then (unless the model clips
what it projects, as OLMo can: that takes several steps). In multi-head latent attention the parts that don't rotate get
√(t/m) each and the part of the queries that does gets t/m, because the key that rotates is one for all heads.

Source: Kimi K2 (arXiv 2507.20534), MuonClip. Query heads that share a key head go by the largest logit among them, as
in Megatron-LM. Ours: where the scheme norms one side alone, the other side's weights take the whole factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_qknorm.backends.masks import Structure
from hf_qknorm.files.untrusted import positive
from hf_qknorm.model.attention import QKNormAttention, patched_layers
from hf_qknorm.ops.tiled_blocks import Problem
from hf_qknorm.ops.types import Options
from hf_qknorm.stats.logit_statistics import PassFilter
from hf_qknorm.stats.logits import visible_keys
from hf_qknorm.stats.observers import add_observer, observers, remove_observer
from hf_qknorm.training.head_weights import along_outputs, attention_head_weights, by_projection


class QKClip(TrainerCallback):
    """Trainer callback: clips the heads whose logits passed `threshold` (default 100), after each optimiser step.

    In a bare loop: `clip = QKClip(model)`, and `clip.step()` after every `optimizer.step()`. The model must be patched;
    the scheme "none" suffices. Watched are all forward passes with gradients since the last step, of all micro-batches
    and ranks, before any cap, without padding. No T×S tensor is formed, and only heads whose vectors are long enough
    are looked at in full.

    The optimiser must step the model's own weights: from fp32 masters the clipped weights would be overwritten.

    Raises ValueError for a model that is not patched, whose heads can't be told, or that norms both queries and keys:
    its logits don't depend on the size of the weights; and for a threshold that is not positive.
    """

    def __init__(self, model: Any, threshold: float = 100.0) -> None:
        self.threshold = positive(threshold, "threshold")
        self.layers = patched_layers(model)
        if not self.layers:
            raise ValueError(f'{type(model).__name__} is not patched: patch_model(model, "none") makes it watchable')
        self.parts = attention_head_weights(model)
        owners: dict[int, str] = {}
        for name, parts in self.parts.items():
            for part in parts.values():
                if (owner := owners.setdefault(id(part.weight), name)) != name:
                    raise ValueError(f"{owner} and {name} share weights: each would clip what the other has")
        self.exponents = {name: _exponents(name, layer) for name, layer in self.layers.items()}
        self.largest: dict[str, Tensor] = {}  # by layer, `[H]`, since the last step
        self.passes = TrainingPassFilter()
        self.watchers = {name: _Watcher(name, self) for name in self.layers}
        self.model = model
        self.hooks: list[Any] = []
        self.watch()

    def watch(self) -> None:
        """Look at the logits from now on, as after construction. What observed the layers before goes on doing so."""
        if not self.hooks:
            for module in [m for m in self.model.modules() if isinstance(m, PreTrainedModel)]:
                self.hooks.append(module.register_forward_pre_hook(self.passes.enter, with_kwargs=True))
                self.hooks.append(module.register_forward_hook(self.passes.leave, always_call=True))
        for name, layer in self.layers.items():
            add_observer(layer, self.watchers[name])

    def remove(self) -> None:
        """Look no more, and leave the model as it was."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        for name, layer in self.layers.items():
            remove_observer(layer, self.watchers[name])

    @torch.no_grad()
    def step(self) -> dict[str, Tensor]:
        """Scale the weights of the heads that passed the threshold since the last step; to be called by every rank.

        Returns what the logits of those layers were scaled by, `[H]`: 1 for heads that were left alone.

        Raises RuntimeError if the layers were not watched to the end.
        """
        for name, layer in self.layers.items():
            if not any(observer is self.watchers[name] for observer in observers(layer)):
                raise RuntimeError(f"{name} is not watched: another observer, or remove(), took the place of QKClip's")
        clipped = {}
        for name, largest in self._gathered().items():
            exponents, parts = self.exponents[name], self.parts[name]
            factor = torch.where(largest > self.threshold, self.threshold / largest, 1.0)
            if "k" in exponents:  # what is done to a shared key head is done to all its queries' logits
                group = len(factor) // parts["k"].heads
                factor = factor.view(-1, group).amin(1).repeat_interleave(group)
            clipped[name] = factor
            factors = {part: factor[:: len(factor) // parts[part].heads] ** e for part, e in exponents.items()}
            for projection, vector in by_projection(parts, factors):
                for p in projection.parameters(recurse=False):
                    p.mul_(along_outputs(vector.to(p.device), projection, p))
        return clipped

    def _gathered(self) -> dict[str, Tensor]:
        """The largest logits `[H]` of layers where any is over the threshold, on any rank; forgets them."""
        heads = {name: max(part.heads for part in self.parts[name].values()) for name in self.layers}
        device = next(iter(self.parts[next(iter(heads))].values())).weight.device
        nothing = {name: torch.full((n,), -math.inf, device=device) for name, n in heads.items()}
        flat = torch.cat([self.largest.get(name, none).to(device, torch.float32) for name, none in nothing.items()])
        self.largest.clear()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(flat, dist.ReduceOp.MAX)
        if not bool((flat > self.threshold).any()):
            return {}
        found = dict(zip(heads, torch.split(flat, list(heads.values())), strict=True))
        return {name: largest for name, largest in found.items() if bool((largest > self.threshold).any())}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.watch()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.remove()


class TrainingPassFilter(PassFilter):
    """The passes with gradients. What gradient checkpointing computes again lies outside of any, and is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.watching, self.depth = False, 0

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.depth == 0:
            self.watching = torch.is_grad_enabled()
        self.depth += 1
        if self.watching:
            super().enter(module, args, kwargs)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.depth -= 1
        self.watching = self.watching and self.depth > 0


class _Watcher:
    """Notes the largest logits of a layer, after whoever observed it before."""

    def __init__(self, name: str, clip: QKClip) -> None:
        self.name, self.clip = name, clip
        self.before: Callable[..., None] | None = None

    @torch.no_grad()
    def __call__(
        self, layer: QKNormAttention, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]
    ) -> None:
        if self.before is not None:
            self.before(layer, q, k, v, mask, options)
        clip = self.clip
        if not clip.passes.watching:
            return
        heads = max(part.heads for part in clip.parts[self.name].values())
        if q.shape[1] != heads:
            raise ValueError(
                f"{self.name} has {q.shape[1]} of its {heads} heads here: QKClip takes no tensor parallelism"
            )
        seen = visible_keys(layer, q, k, mask, options, clip.passes.real(None, q.shape[2], q.device))
        largest = largest_logits(q, seen, options["scaling"], clip.threshold)
        known = clip.largest.get(self.name)
        clip.largest[self.name] = largest if known is None else torch.maximum(known, largest)


def largest_logits(q: Tensor, seen: Structure, scale: float, threshold: float) -> Tensor:
    """The largest visible logit, before any cap, of each head of q `[B, H, T, D]`, `[H]`.

    −∞ where ‖q‖·‖k‖ alone says that it is at most `threshold`: only the other heads' logits are formed, in blocks.
    """
    k, group = seen.key, q.shape[1] // seen.key.shape[1]
    longest_q, longest_k = (torch.linalg.vector_norm(x.to(_wide(x)), dim=-1).amax((0, 2)) for x in (q, k))
    bound = (scale * longest_q).view(-1, group).amax(1) * longest_k
    largest = bound.new_full((k.shape[1], group), -math.inf)
    heads = (~(bound <= threshold)).nonzero().flatten()
    if len(heads) == 0:
        return largest.flatten()
    mask = seen.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask > torch.finfo(mask.dtype).min
    if mask is not None and mask.shape[1] > 1:
        mask = mask.reshape(mask.shape[0], -1, group, *mask.shape[2:])[:, heads].flatten(1, 2)
    q, k = q.reshape(q.shape[0], -1, group, *q.shape[2:])[:, heads].flatten(1, 2), k[:, heads]
    problem = Problem(q, k, k, mask, seen.ranges, None, Options(scale, None, seen.causal, seen.window))
    buffer = problem.buffer()
    for block in problem.blocks:
        logits = problem.logits(block, buffer, buffer).view(block.shape[0], len(heads), group, -1)
        largest[heads] = torch.maximum(largest[heads], logits.amax((0, 3)).to(largest.dtype))
    return largest.flatten()


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _exponents(name: str, layer: QKNormAttention) -> dict[str, float]:
    """The powers of the factor on a head's logits that the weights of its parts are scaled by; they add up to 1."""
    if layer.family.latent:
        return {"uq": 0.5, "uk": 0.5, "qr": 1.0}
    normed = {side for side in ("q", "k") if layer.has_own_norms or getattr(layer.scheme, side) is not None}
    if len(normed) == 2:
        raise ValueError(
            f"{name} norms both its queries and its keys: the size of its logits does not depend on that of the "
            "weights, and clipping these would do nothing. Leave out QKClip, or cap the logits (softcap)"
        )
    free = [side for side in ("q", "k") if side not in normed]
    return {side: 1 / len(free) for side in free}
