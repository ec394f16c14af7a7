"""The weights of each head's queries and keys: which outputs of which projection, their norms, and how to scale them.

For patched and unpatched models, and for sharded weights (DTensor), whose shards may divide a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_qknorm.families import FAMILIES, Family, family_of
from hf_qknorm.model.attention import own_layers, patched_layers


@dataclass(frozen=True)
class HeadWeights:
    """The heads' queries, or keys, in a projection: head h has the `width` outputs from `begin` + h·`stride` on."""

    projection: Any
    heads: int
    width: int
    stride: int
    begin: int = 0

    @property
    def weight(self) -> Tensor:
        """The projection's present weight; sharding replaces a model's parameters."""
        return self.projection.weight

    def outputs(self, device: torch.device) -> Tensor:
        """The indices of each head's outputs, `[heads, width]`."""
        head, place = (torch.arange(n, device=device) for n in (self.heads, self.width))
        return self.begin + self.stride * head[:, None] + place

    def norms(self, weight: Tensor | None = None) -> Tensor:
        """The Frobenius norm of each head's part of the weight, or of a gradient, `[heads]`, in fp32 at least."""
        weight = self.weight.detach() if weight is None else weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        rows = torch.linalg.vector_norm(weight, dim=_inputs(self.projection), dtype=wide)
        rows = rows.full_tensor() if isinstance(rows, DTensor) else rows
        return torch.linalg.vector_norm(rows[self.outputs(rows.device)], dim=1)


def attention_head_weights(model: nn.Module) -> dict[str, dict[str, HeadWeights]]:
    """The weights of queries and keys of each attention layer of `model`: layer name → part name → `HeadWeights`.

    The model may be unpatched. The parts are "q" and "k"; in multi-head latent attention "dq" and "dkv" (down to the
    latents, one part for all heads), "uq" and "uk" (up from them, per head), "qr" and "kr" (with RoPE; kr is shared).
    Without a latent for the queries there is no "dq".

    Raises ValueError for a model without a layer of a known family, and for projections without a plain weight.
    """
    return {
        name: _latent_parts(name, layer) if family.latent else _parts(name, layer, family)
        for name, layer, family in _layers(model)
    }


def fused_outputs(model: nn.Module) -> Iterator[tuple[Any, int, list[Tensor]]]:
    """Yield the projections to queries, keys and values at once: module, dimension of the outputs, and the outputs.

    The outputs are indices, those of the queries, of the keys and of the values. Raises ValueError as
    `attention_head_weights` does.
    """
    for name, layer, family in _layers(model):
        if len(family.style.weights) == 1:
            parts = _parts(name, layer, family)
            projection = parts["q"].projection
            q, k = (part.outputs(torch.device("cpu")).flatten() for part in parts.values())
            others = torch.ones(_size(projection), dtype=torch.bool)
            others[q] = others[k] = False
            yield projection, 1 - _inputs(projection), [q, k, others.nonzero().flatten()]


def _layers(model: nn.Module) -> list[tuple[str, Any, Family]]:
    """Name, module and family of each attention layer, patched or not. Raises ValueError without any."""
    layers: dict[str, tuple[Any, Family]] = {n: (layer, layer.family) for n, layer in patched_layers(model).items()}
    for prefix, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and module.config.model_type in FAMILIES:
            family = family_of(module.config)
            for name, layer in own_layers(module, family).items():
                layers[f"{prefix}.{name}" if prefix else name] = layer, family
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention layer of a known family: see hf-qknorm families")
    return [(name, *found) for name, found in layers.items()]


def parameter_factors(
    parts: dict[str, HeadWeights], factors: dict[str, Tensor]
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield the projections' weights and biases, sharded or not, with a factor for each output, which broadcasts.

    `factors` are those of parts, `[heads]`. Other outputs have the factor 1. Projections without a factor are left out.
    """
    vectors: dict[Any, Tensor] = {}
    for name, factor in factors.items():
        part = parts[name]
        vector = vectors.setdefault(part.projection, factor.new_ones(_size(part.projection)))
        vector[part.outputs(vector.device)] = factor[:, None]
    for projection, vector in vectors.items():
        for p in projection.parameters(recurse=False):
            along = vector.to(p.device)
            along = along.unsqueeze(_inputs(projection)) if p.dim() == 2 else along
            if isinstance(p, DTensor):
                mesh = p.device_mesh
                along = DTensor.from_local(along, mesh, [Replicate()] * mesh.ndim, run_check=False)
            yield p, along


def _inputs(projection: nn.Module) -> int:
    """The dimension of the inputs in the projection's weight."""
    return 0 if isinstance(projection, Conv1D) else 1


def _parts(name: str, layer: Any, family: Family) -> dict[str, HeadWeights]:
    style = family.style
    heads, heads_kv, dim = style.heads(layer)
    if len(style.weights) > 1:  # the query projection may hold a gate, and heads may differ by layer
        q, k = (_projection(name, layer, part) for part in style.weights[:2])
        heads_kv = _size(k) // dim
        heads = heads_kv * getattr(layer, "num_key_value_groups", 1)
        return {"q": HeadWeights(q, heads, dim, _size(q) // heads), "k": HeadWeights(k, heads_kv, dim, dim)}
    fused = _projection(name, layer, style.weights[0])
    if style.interleaved(layer):
        return {"q": HeadWeights(fused, heads, dim, 3 * dim), "k": HeadWeights(fused, heads, dim, 3 * dim, begin=dim)}
    return {"q": HeadWeights(fused, heads, dim, dim), "k": HeadWeights(fused, heads_kv, dim, dim, begin=heads * dim)}


def _latent_parts(name: str, layer: Any) -> dict[str, HeadWeights]:
    plain, turned, latent = layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.kv_lora_rank
    has_latent = getattr(layer, "q_a_proj", None) is not None  # for the queries
    q = _projection(name, layer, "q_b_proj" if has_latent else "q_proj")
    down, up = (_projection(name, layer, part) for part in ("kv_a_proj_with_mqa", "kv_b_proj"))
    head_dim = plain + turned
    heads = _size(q) // head_dim
    parts = {
        "uq": HeadWeights(q, heads, plain, head_dim),
        "qr": HeadWeights(q, heads, turned, head_dim, begin=plain),
        "dkv": HeadWeights(down, 1, latent, latent),
        "kr": HeadWeights(down, 1, turned, turned, begin=latent),
        "uk": HeadWeights(up, heads, plain, _size(up) // heads),
    }
    if has_latent:
        parts["dq"] = HeadWeights(_projection(name, layer, "q_a_proj"), 1, layer.q_lora_rank, layer.q_lora_rank)
    return parts


def _size(projection: Any) -> int:
    """The number of a projection's outputs."""
    size: int = projection.weight.shape[1 - _inputs(projection)]
    return size


def _projection(name: str, layer: Any, part: str) -> Any:
    """The layer's projection `part`. Raises ValueError for one without a plain weight."""
    projection = getattr(layer, part, None)
    if projection is None:
        raise ValueError(f"{name} has no {part}: it attends to the keys of another layer, which is not supported here")
    if not isinstance(projection, nn.Linear | Conv1D):
        raise ValueError(
            f"{name}.{part} is a {type(projection).__module__}.{type(projection).__name__}: expected torch's Linear "
            "or transformers' Conv1D, whose outputs belong to heads. Merge adapters first"
        )
    if projection.weight.dim() != 2 or not projection.weight.is_floating_point():
        raise ValueError(
            f"{name}.{part} has a weight of shape {list(projection.weight.shape)} and {projection.weight.dtype}, "
            "expected floating point of two dimensions: do not quantise it, and shard it by FSDP2 (fully_shard), which "
            "keeps its shape"
        )
    return projection
