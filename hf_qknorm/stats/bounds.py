"""The bound on a layer's attention logits for any input, from its norms; `ops/README.md` derives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_qknorm.model.attention import QKNormAttention, head_norms, patched_layers
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.ops.norms import NORMS
from hf_qknorm.stats.distributed import full_tensor


def logit_bound(layer: QKNormAttention) -> float | None:
    """The largest |logit| of a patched layer, before any cap, for any input; rounding may exceed it.

    None where queries or keys have no norm from the scheme, or a blend is in progress. In models that scale queries by
    position, the bound holds up to the model's maximum position.
    """
    norms = head_norms(layer)
    q, k = norms.get("q_norm"), norms.get("k_norm")
    if q is None or k is None or any(norm.bypass or norm.blend is not None for norm in (q, k)):
        return None
    style = layer.family.style
    head_dim = style.heads(layer)[2]
    queries, keys = _lengths(q, head_dim), _lengths(k, head_dim)
    if 1 in (len(queries), len(keys)):
        largest = float(queries.max() * keys.max())
    else:  # each key head meets its group of query heads
        largest = float((queries.view(len(keys), -1) * keys[:, None]).max())
    return abs(layer.logit_scale) * style.query_scale(layer) * rotary_scale(layer) ** 2 * largest


def worst_bound(model: Any) -> float | None:
    """The largest bound of a patched model's layers; None if a layer has no bound."""
    bounds = [logit_bound(layer) for layer in patched_layers(model).values()]
    return None if None in bounds else max(bound for bound in bounds if bound is not None)


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


def _lengths(norm: HeadNorm, head_dim: int) -> Tensor:
    """The largest length of a norm's output, `[H]` or `[1]` in fp64: one number per head with its own gain."""
    gain = _rows(torch.ones(1) if norm.weight is None else norm.weight, head_dim).abs()
    longest = gain.amax(-1)
    if norm.order > 2:
        order = 2 * norm.order / (norm.order - 2)
        unit = longest.clamp_min(torch.finfo(torch.float64).tiny)[:, None]  # avoids overflow in the power
        longest = longest * (gain / unit).pow(order).sum(-1).pow(1 / order)
    if not NORMS[norm.norm].summed:
        longest = longest * head_dim ** (1 / norm.order)
    return longest if norm.bias is None else longest + _rows(norm.bias, head_dim).norm(dim=-1)


def _rows(parameter: Tensor, head_dim: int) -> Tensor:
    """A gain or bias of all ranks as rows, `[H, D]` or `[1, D]` in fp64."""
    values = full_tensor(parameter.detach()).double().cpu()
    return values.reshape(-1, values.shape[-1]).expand(-1, head_dim)
