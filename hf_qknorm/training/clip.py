"""QK-Clip: after the optimiser's step, scale down the weights of heads whose logits passed a threshold.

A head whose largest logit in the step's forward passes was m > threshold t gets W_q and W_k times √(t/m) each, biases
too. Because q·k is linear in each, its largest logit for the same input is then t (except in models that clip their
projections, such as OLMo, which take several steps). In multi-head latent attention the parts without RoPE get √(t/m)
each and the part of the queries with RoPE gets t/m, because all heads share the key with RoPE.

Source: Kimi K2 (arXiv 2507.20534), MuonClip. The query heads of a key head are scaled by the largest logit among them,
as in Megatron-LM. Not in the paper: where the scheme norms one side alone, the other side takes the whole factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_qknorm.files.untrusted import check_positive
from hf_qknorm.measure.distributed import reshard
from hf_qknorm.measure.head_weights import changeable_head_weights, normed_sides, parameter_factors
from hf_qknorm.measure.logits import call_to_measure
from hf_qknorm.model.attention import QKNormAttention, require_patched
from hf_qknorm.model.passes import PassFilter, sees
from hf_qknorm.model.rollback import undone_on_error
from hf_qknorm.ops import tiled
from hf_qknorm.ops.types import Call, Heads


class QKClip(TrainerCallback):
    """Trainer callback: after each optimiser step, clips the heads with a logit over `threshold` (default 100).

    It sees all forward passes with gradients since the last step, of all micro-batches and ranks, before any cap and
    without padding. Large negative logits do not count, as published, nor do infinite ones, as after an overflow in
    fp16. No T×S tensor is formed; logits are computed only for heads whose vectors are long enough to pass the
    threshold. The scheme "none" suffices. In a bare loop, call `clip.step()` after every `optimizer.step()`:

        >>> clip = qk.QKClip(qk.patch_model(model, "none"), threshold=1e-3)
        >>> ids = torch.arange(8)[None]
        >>> model(ids, labels=ids).loss.backward()
        >>> factors = clip.step()  # by layer, `[H]`
        >>> all(bool((factor < 1).any()) for factor in factors.values())
        True

    The optimiser must step the model's own weights: from fp32 copies it would overwrite the clipped weights. Frozen
    weights stay as they are.

    Raises ValueError for a model that is not patched, shares weights of queries or keys, or has projections of an
    unknown kind; for one that norms both queries and keys (in latent attention queries alone), so that logits do not
    depend on the size of the weights; and for a threshold that is not positive. When training begins, for a Trainer of
    another model, as its `model_init` makes. Then, and in a step that clips, for adapters that were added since, for
    DeepSpeed and for FSDP 1. In the first pass, for tensor parallelism.
    Source: Kimi K2 (arXiv 2507.20534).
    """

    def __init__(self, model: Any, threshold: float = 100.0) -> None:
        self.threshold = check_positive(threshold, "threshold")
        self.layers = require_patched(model)
        self.exponents = {name: _exponents(name, layer) for name, layer in self.layers.items()}
        self.parts = changeable_head_weights(model, "QKClip")
        self.heads = {name: max(part.heads for part in self.parts[name].values()) for name in self.layers}
        self.largest: dict[str, Tensor] = {}  # by layer, `[H]`, since the last step
        self.passes = PassFilter(_has_gradients)
        self.model = model
        self.undo: list[Callable[[], Any]] = []  # of `watch`
        self.watch()

    def watch(self) -> None:
        """Observe the logits from now on, as after construction, beside other observers."""
        self.remove()
        self.largest.clear()  # of a step that an exception ended
        self.undo = self.passes.observe(self.model, dict.fromkeys(self.layers, self._observe))

    def remove(self) -> None:
        """Stop observing, and remove all hooks from the model."""
        while self.undo:
            self.undo.pop()()

    @torch.no_grad()
    def _observe(
        self, layer: QKNormAttention, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]
    ) -> None:
        """Record the largest logits of the layer."""
        if not self.passes.watching:
            return
        name = next(name for name, own in self.layers.items() if own is layer)
        if q.shape[1] != self.heads[name]:
            raise ValueError(
                f"{name} has {q.shape[1]} of its {self.heads[name]} heads here: QKClip does not support tensor "
                "parallelism"
            )
        call = call_to_measure(layer, q, k, mask, options, self.passes.real(None, q, k, mask))
        largest = largest_logits(call, self.threshold)
        self.largest[name] = torch.maximum(self.largest.get(name, largest), largest)

    @torch.no_grad()
    def step(self) -> dict[str, Tensor]:
        """Scale the weights of the heads that passed the threshold since the last step; every rank must call this.

        Returns, for layers with such a head, the factors of the heads' logits, `[H]`: 1 for heads that are unchanged.

        Raises RuntimeError if a layer is no longer observed, and ValueError, with the weights unchanged, for a clip in
        a model that has adapters by now.
        """
        for name, layer in self.layers.items():
            if self._observe not in getattr(layer, "observers", ()):  # unpatched layers have none
                raise RuntimeError(f"{name} is not watched: another observer replaced QKClip's, or remove() was called")
        clipped = {}
        reshard(self.model)
        if gathered := self._gathered():
            changeable_head_weights(self.model, "QKClip")  # not adapters: checkpoints lack the weights under them
        with undone_on_error() as keep:
            for name, largest in gathered.items():
                exponents, parts = self.exponents[name], self.parts[name]
                factor = torch.where(largest > self.threshold, self.threshold / largest, 1.0)
                if "k" in exponents:  # a shared key head scales the logits of all its query heads
                    group = len(factor) // parts["k"].heads
                    factor = factor.view(-1, group).amin(1).repeat_interleave(group)
                clipped[name] = factor
                factors = {part: factor[:: len(factor) // parts[part].heads] ** e for part, e in exponents.items()}
                for p, scale in parameter_factors(parts, factors):
                    if p.requires_grad:
                        keep(p)
                        p.mul_(scale)
        return clipped

    def _gathered(self) -> dict[str, Tensor]:
        """Take the largest logits `[H]` over all ranks of the layers where any passed the threshold."""
        device = next(iter(self.parts[next(iter(self.layers))].values())).weight.device
        rows = [self.largest.get(name, torch.full((n,), -math.inf)) for name, n in self.heads.items()]
        flat = torch.cat([row.to(device, torch.float32) for row in rows])
        self.largest.clear()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(flat, dist.ReduceOp.MAX)
        flat = torch.where(flat.isfinite(), flat, -math.inf)  # an overflow has no factor: threshold / ∞ would be 0
        if not bool((flat > self.threshold).any()):  # one synchronisation instead of one per layer
            return {}
        found = zip(self.heads, torch.split(flat, list(self.heads.values())), strict=True)
        return {name: largest for name, largest in found if bool((largest > self.threshold).any())}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        modules = {*kwargs["model"].modules()}
        if other := next((name for name, layer in self.layers.items() if layer not in modules), None):
            raise ValueError(
                f"{other} is no layer of the model that the Trainer trains, and QKClip would clip another model: give "
                "the Trainer the model of QKClip itself, without model_init"
            )
        changeable_head_weights(self.model, "QKClip")  # as `step`, before the first one
        reshard(kwargs["model"])
        self.watch()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.remove()


def _has_gradients(model: nn.Module) -> bool:
    """Whether a forward pass of the model counts; no lambda, which pickles can't hold."""
    return torch.is_grad_enabled()


def largest_logits(call: Call, threshold: float) -> Tensor:
    """The largest visible logit, before any cap, of each head of q `[B, H, T, D]`, `[H]`.

    −∞ where ‖q‖·‖k‖ shows that it is at most `threshold`: only the logits of the other heads are computed, in blocks.
    """
    (q, k, *_), visible, options = call
    group = q.shape[1] // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    longest_q, longest_k = (torch.linalg.vector_norm(x, dim=-1, dtype=wide).amax((0, 2)) for x in (q, k))
    bound = (options.scale * longest_q).view(-1, group).amax(1) * longest_k
    largest = bound.new_full((k.shape[1], group), -math.inf)
    heads = (~(bound <= threshold)).nonzero().flatten()  # with NaN in one head, the others of its group are measured
    if len(heads) == 0:
        return largest.flatten()
    mask = None if visible.mask is None else sees(visible.mask)
    if mask is not None and mask.shape[1] > 1:
        mask = mask.reshape(mask.shape[0], -1, group, *mask.shape[2:])[:, heads].flatten(1, 2)
    q, k = q.reshape(q.shape[0], -1, group, *q.shape[2:])[:, heads].flatten(1, 2), k[:, heads]
    found = tiled.largest_logits(Heads(q, k, k), visible._replace(mask=mask), options._replace(softcap=None))
    largest[heads] = torch.maximum(largest[heads], found.view(-1, group).to(largest.dtype))
    return largest.flatten()


def _exponents(name: str, layer: QKNormAttention) -> dict[str, float]:
    """The exponents of a head's factor for the weights of its parts; for q·k they add up to 1."""
    normed = normed_sides(layer, layer.family)
    if len(normed) == 2 or (layer.family.latent and "q" in normed):  # heads share the latent key that rotates
        raise ValueError(
            f"{name} norms its {' and '.join({'q': 'queries', 'k': 'keys'}[side] for side in normed)}: scaling the "
            "weights of a head would not change its logits. Leave out QKClip, or cap the logits (softcap)"
        )
    if layer.family.latent:
        return {"uq": 1.0, "qr": 1.0} if normed else {"uq": 0.5, "uk": 0.5, "qr": 1.0}
    free = [side for side in ("q", "k") if side not in normed]
    return {side: 1 / len(free) for side in free}
