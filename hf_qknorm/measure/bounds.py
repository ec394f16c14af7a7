"""The bound on a layer's attention logits for any input, from its norms; `ops/README.md` derives it.

The norms belong to a scheme, or to the model itself, as in Qwen3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_qknorm.measure.distributed import full_tensor
from hf_qknorm.model.accelerate_hooks import is_hooked, loaded
from hf_qknorm.model.attention import QKNormAttention, head_norms, patched_layers
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.reports.records import largest_bound


class NormRange(NamedTuple):
    """A norm's largest |gain|, 1 without one, and the largest length of its output, `[H]` or `[1]` in fp64."""

    gain: float
    lengths: Tensor


def norm_limits(model: Any) -> dict[str, dict[str, float | None]]:
    """By layer of a patched model, `gain_q`, `gain_k` and `bound` of `LayerStatistics`; every rank must call this."""
    layers, found = patched_layers(model), {}
    for name, layer in layers.items():
        pairs = _ranges(layer, layers)
        sides = zip(("gain_q", "gain_k"), zip(*pairs, strict=True), strict=True)
        gains = {side: max((part.gain for part in parts if part), default=None) for side, parts in sides}
        found[name] = {**gains, "bound": _bound(layer, pairs)}
    return found


def _bound(layer: QKNormAttention, pairs: list[tuple[NormRange | None, ...]]) -> float | None:
    """The largest |logit| of a patched layer, before any cap, for any input; rounding may exceed it.

    None where queries or keys have no norm. In models that scale queries by position, it holds up to the model's
    maximum position.
    """
    if any(norm.bypass for norm in head_norms(layer).values()):
        return None
    rotary = 1.0 if layer.has_own_norms and layer.family.style.norms_rotated else rotary_scale(layer)
    products = torch.zeros(1, dtype=torch.float64, device="cpu")
    for place, (q, k) in enumerate(pairs, start=1):
        if q is None or k is None:
            return None
        group = max(len(q.lengths) // len(k.lengths), 1)  # each key head meets its group of query heads
        keys = k.lengths.repeat_interleave(group)
        products = products + q.lengths * keys * (rotary**2 if place == len(pairs) else 1.0)
    return abs(layer.logit_scale) * layer.family.style.query_scale(layer) * float(products.max())


def worst_bound(model: Any) -> float | None:
    """The largest bound of a patched model's layers; None if a layer has no bound."""
    return largest_bound(limits["bound"] for limits in norm_limits(model).values())


def rotary_scale(layer: QKNormAttention) -> float:
    """The largest factor of RoPE on the length of a query or key: the attention factor of YaRN and LongRoPE.

    At least 1, because a part of each head may not rotate.
    """
    config = layer.config
    rope: Mapping[str, Any] | None = getattr(config, "rope_parameters", None)
    thetas = getattr(config, "layer_rope_theta", None)  # Granite: 0 for a layer without RoPE
    if not rope or not layer.family.style.rotates(layer) or (thetas and not thetas[layer.layer_idx]):
        return 1.0
    kind = None
    if "rope_type" not in rope:  # a mapping from layer types
        kind = getattr(layer, "layer_type", None) or config.layer_types[layer.layer_idx]
        rope = rope[kind]
    if rope is None or rope["rope_type"] == "default":
        return 1.0
    _, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), layer_type=kind)
    own = (rope.get(name) or 1.0 for name in ("short_mscale", "long_mscale"))  # Phi-3.5-MoE has these instead
    return float(max(1.0, factor, *own))


def _ranges(layer: QKNormAttention, layers: Mapping[str, QKNormAttention]) -> list[tuple[NormRange | None, ...]]:
    """The ranges of the norms of a layer's queries and keys, by part of a head; None for a side without a norm.

    Heads have one part, or where a latent is cached two: without and with RoPE.
    """
    if not layer.family.attention:  # its norms are unknown
        return [(None, None)]
    heads, heads_kv, head_dim = layer.family.style.heads(layer)
    if not layer.has_own_norms:
        norms, sizes = head_norms(layer), layer.family.style.norm_sizes(layer)
        found: dict[str, NormRange | None] = dict.fromkeys(sizes)
        for name, norm in norms.items():
            with loaded(norm):
                gain = 1.0 if norm.weight is None else float(full_tensor(norm.weight.detach()).abs().max())
                found[name] = NormRange(gain, _lengths(norm, sizes[name][1]))
        parts = [("q_norm", "k_norm"), ("q_rope_norm", "k_rope_norm")]
        return [(found[q], found[k]) for q, k in parts if q in found]
    key_layer = layer
    if getattr(layer, "is_kv_shared_layer", False):  # in Gemma 3n and 4, which shares the keys of another
        key_layer = next(x for x in layers.values() if x.store_full_length_kv and x.layer_type == layer.layer_type)
    names, together = layer.family.style.own_norms, layer.family.style.norms_together
    sides = zip((layer, key_layer), names, (heads, heads_kv), strict=True)
    q, k = (_own_range(x._modules.get(name), count, head_dim, together) for x, name, count in sides)
    return [(q, k)]


def _own_range(norm: Any, heads: int, head_dim: int, together: bool) -> NormRange | None:
    """The range of a model's own RMSNorm or LayerNorm; None for None.

    Gain and bias are read off its outputs for ±x: the norm's class may store the gain less 1, or in several modules.
    """
    if norm is None:
        return None
    # entries of ±1 have mean 0 and mean square 1 over every head and over all heads; beside them eps is nothing
    x = torch.tensor([1e3, -1e3], dtype=torch.float64, device="cpu").repeat(heads * head_dim // 2)
    if together:
        up, down = (_call(norm, sign * x.view(1, 1, -1)).view(heads, head_dim) for sign in (1, -1))
    else:  # the layout is `[B, T, H, D]` or `[B, H, T, D]`: with T = H the diagonal is each head's in both
        square = x.view(1, 1, heads, head_dim).expand(1, heads, heads, head_dim)
        up, down = (_call(norm, sign * square)[0].diagonal().T for sign in (1, -1))
    gain, bias = (up - down).abs() / 2, (up + down) / 2
    length = math.sqrt(heads * head_dim if together else head_dim)  # one head may have all of it
    return NormRange(float(gain.max()), gain.amax(-1) * length + bias.norm(dim=-1))


@torch.no_grad()
def _call(norm: nn.Module, x: Tensor) -> Tensor:
    """A norm's output for x, in fp64 on the CPU, whatever the place of its weights."""
    if is_hooked(norm):  # the hook moves the weights
        output: Tensor = norm(x.float())
    else:
        values = {name: full_tensor(p.detach()).double().cpu() for name, p in norm.named_parameters()}
        output = functional_call(norm, values, (x,))
    return output.double().cpu()


def _lengths(norm: HeadNorm, head_dim: int) -> Tensor:
    """The largest length of a norm's output, `[H]` or `[1]` in fp64: one number per head with its own gain."""
    gain = _rows(norm.knee.new_ones(1) if norm.weight is None else norm.weight, head_dim).abs()
    longest = gain.amax(-1)
    if norm.order > 2:
        order = 2 * norm.order / (norm.order - 2)
        unit = longest.clamp_min(torch.finfo(torch.float64).tiny)[:, None]  # avoids overflow in the power
        longest = longest * (gain / unit).pow(order).sum(-1).pow(1 / order)
    longest = longest * head_dim ** (1 / norm.order) * norm.length()
    return longest if norm.bias is None else longest + _rows(norm.bias, head_dim).norm(dim=-1)


def _rows(parameter: Tensor, head_dim: int) -> Tensor:
    """A gain or bias of all ranks as rows, `[H, D]` or `[1, D]` in fp64."""
    values = full_tensor(parameter.detach()).double().cpu()
    return values.reshape(-1, values.shape[-1]).expand(-1, head_dim)
