"""The weights of each head's queries and keys: which outputs of which projection, their sizes, and how to scale them.

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
from hf_qknorm.measure.distributed import full_tensor
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.fold import PLAIN
from hf_qknorm.model.install import own_layers
from hf_qknorm.model.weights import check_not_copied, check_unshared


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


@torch.no_grad()
def sizes(parts: dict[str, HeadWeights]) -> dict[str, Tensor]:
    """The present size of each head of a layer's parts, `[heads]` in fp32 at least: √(‖W‖² + ‖b‖²).

    It is the root mean square length of a head's outputs over isotropic inputs with a mean square of 1. With sharded
    weights every rank must call this.
    """
    squares = {part.projection: _mean_squares(part.projection) for part in parts.values()}
    found = ((name, part, squares[part.projection]) for name, part in parts.items())
    return {name: square[part.outputs(square.device)].sum(1).sqrt() for name, part, square in found}


def _mean_squares(projection: Any) -> Tensor:
    """The mean square of each output of a projection, `[outputs]`, over the inputs that `sizes` describes."""
    weight, bias = projection.weight.detach(), projection.bias
    wide = torch.promote_types(weight.dtype, torch.float32)
    squares = full_tensor(weight.to(wide).square().sum(_inputs(projection)))
    return squares if bias is None else squares + full_tensor(bias.detach()).square()


def attention_head_weights(model: nn.Module) -> dict[str, dict[str, HeadWeights]]:
    """The weights of queries and keys of each attention layer of `model`: layer name → part name → `HeadWeights`.

    The model may be unpatched. The parts are "q" and "k"; in multi-head latent attention "uq" and "uk" (up from the
    latents), and "qr" (of queries, with RoPE). The key with RoPE, which all heads share, is none of them.

    Raises ValueError for a model without a layer of a known family, and for projections without a plain weight.
    """
    layers = attention_layers(model)
    return {
        name: _latent_parts(name, layer) if family.latent else _parts(name, layer, family)
        for name, layer, family in layers
    }


def changeable_head_weights(model: nn.Module, change: str) -> dict[str, dict[str, HeadWeights]]:
    """`attention_head_weights` of a model whose projections can be changed in place, each by itself.

    Raises ValueError, with what makes the `change`, for DeepSpeed and for shared weights.
    """
    check_not_copied(model, change)
    layers = attention_head_weights(model)
    projections = {part.projection for parts in layers.values() for part in parts.values()}
    check_unshared(model, [p for each in projections for p in each.parameters(recurse=False)], change)
    return layers


def attention_layers(model: nn.Module) -> list[tuple[str, Any, Family]]:
    """Name, module and family of each attention layer, patched or not. Raises ValueError without any."""
    layers: dict[str, tuple[Any, Family]] = {n: (layer, layer.family) for n, layer in patched_layers(model).items()}
    for prefix, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and module.config.model_type in FAMILIES:
            family = family_of(module.config)
            for name, layer in own_layers(module, family).items():
                layers[f"{prefix}.{name}" if prefix else name] = layer, family
    layers = {name: (layer, family) for name, (layer, family) in layers.items() if family.attention}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention layer of a known family: see hf-qknorm families")
    return [(name, *found) for name, found in layers.items()]


def normed_sides(layer: Any, family: Family) -> list[str]:
    """The sides of the layer, "q" and "k", that the model or a scheme norms."""
    own, scheme = family.has_norms(getattr(layer, "config", None)), getattr(layer, "scheme", None)
    return [side for side in ("q", "k") if own or getattr(scheme, side, None) is not None]


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
            yield p, _beside(vector.unsqueeze(_inputs(projection)) if p.dim() == 2 else vector, p)


def _beside(vector: Tensor, p: Tensor) -> Tensor:
    """The vector where `p` is, replicated if `p` is sharded."""
    vector = vector.to(p.device)
    if not isinstance(p, DTensor):
        return vector
    mesh = p.device_mesh
    return DTensor.from_local(vector, mesh, [Replicate()] * mesh.ndim, run_check=False)


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
    stride, keys = (3 * dim, dim) if style.interleaved(layer) else (dim, heads * dim)
    return {"q": HeadWeights(fused, heads, dim, stride), "k": HeadWeights(fused, heads_kv, dim, stride, keys)}


def _latent_parts(name: str, layer: Any) -> dict[str, HeadWeights]:
    plain, turned = layer.qk_nope_head_dim, layer.qk_rope_head_dim
    has_latent = getattr(layer, "q_a_proj", None) is not None  # for the queries
    q, up = (_projection(name, layer, part) for part in ("q_b_proj" if has_latent else "q_proj", "kv_b_proj"))
    head_dim = plain + turned
    heads = _size(q) // head_dim
    return {
        "uq": HeadWeights(q, heads, plain, head_dim),
        "qr": HeadWeights(q, heads, turned, head_dim, plain),
        "uk": HeadWeights(up, heads, plain, _size(up) // heads),
    }


def _size(projection: Any) -> int:
    """The number of a projection's outputs."""
    size: int = projection.weight.shape[1 - _inputs(projection)]
    return size


def _projection(name: str, layer: Any, part: str) -> Any:
    """The layer's projection `part`. Raises ValueError for one without a plain weight."""
    try:
        projection = layer.get_submodule(part)
    except AttributeError:
        raise ValueError(
            f"{name} has no {part}: it attends to the keys of another layer, which is not supported here"
        ) from None
    weight = projection.weight if isinstance(projection, nn.Linear | Conv1D) else None
    whole = weight is not None and weight.dim() == 2 and weight.is_floating_point()
    if not whole or not isinstance(weight, nn.Parameter) or type(weight) not in PLAIN:
        held = "" if weight is None else f" with a {type(weight).__name__} {list(weight.shape)} of {weight.dtype}"
        kind = type(projection)
        raise ValueError(
            f"{name}.{part} is a {kind.__module__}.{kind.__name__}{held}: expected torch's Linear or transformers' "
            "Conv1D with a Parameter of floating point and two dimensions, whose outputs belong to heads. Merge "
            "adapters first, end parametrizations and do not quantise it; shard by FSDP2 (fully_shard)"
        )
    return projection
