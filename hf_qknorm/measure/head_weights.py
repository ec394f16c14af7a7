"""The weights of each head's queries and keys: which outputs of which projection, their sizes, and how to scale them.

For patched and unpatched models, and for sharded weights (DTensor), whose shards may divide a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_qknorm.families import FAMILIES, Family, family_of
from hf_qknorm.measure.distributed import full_tensor
from hf_qknorm.measure.input_norms import GainAndBias, InputNorm, input_norm
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.fold import PLAIN
from hf_qknorm.model.install import own_layers
from hf_qknorm.model.weights import check_not_copied, check_unshared


@dataclass(frozen=True)
class HeadWeights:
    """The heads' queries, or keys, in a projection: head h has the `width` outputs from `begin` + h·`stride` on.

    `norm` is the norm whose result the projection takes; None without one.
    """

    projection: Any
    heads: int
    width: int
    stride: int
    begin: int = 0
    norm: InputNorm | None = None

    @property
    def weight(self) -> Tensor:
        """The projection's present weight; sharding replaces a model's parameters."""
        return self.projection.weight

    def outputs(self, device: torch.device) -> Tensor:
        """The indices of each head's outputs, `[heads, width]`."""
        head, place = (torch.arange(n, device=device) for n in (self.heads, self.width))
        return self.begin + self.stride * head[:, None] + place


class Sizes(NamedTuple):
    """Root mean squares by part, in fp32 at least, over isotropic inputs of a projection.

    An input is g·x̂ + β with the gain and bias of the norm in front, or x̂ without a norm; x̂ has a mean square of 1.
    `inputs` (scalars) are the sizes of an input's entries, and `outputs` `[heads]` the lengths of a head's outputs:
    √(‖W·diag(g)‖² + ‖W·β + b‖²).
    """

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


@torch.no_grad()
def sizes(parts: dict[str, HeadWeights]) -> Sizes:
    """The present sizes of a layer's parts; with sharded weights every rank must call this."""
    norms: dict[InputNorm | None, GainAndBias] = {None: (None, None)}
    norms |= {part.norm: part.norm.gain_and_bias() for part in parts.values() if part.norm is not None}
    squares = {p.projection: _mean_squares(p.projection, p.norm, norms[p.norm]) for p in parts.values()}
    inputs, outputs = {}, {}
    for name, part in parts.items():
        (gain, bias), found = norms[part.norm], squares[part.projection]
        square = found.new_ones(()) if gain is None else gain.square().mean()
        inputs[name] = (square if bias is None else square + bias.square().mean()).sqrt()
        outputs[name] = found[part.outputs(found.device)].sum(1).sqrt()
    return Sizes(inputs, outputs)


def _mean_squares(projection: Any, norm: InputNorm | None, gain_and_bias: GainAndBias) -> Tensor:
    """The mean square of each output of a projection, `[outputs]`, over the inputs that `Sizes` describes."""
    inputs, weight = _inputs(projection), projection.weight.detach()
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    gain, bias = (None if x is None else _beside(x.unsqueeze(1 - inputs), weight) for x in gain_and_bias)
    scaled = weight if gain is None else weight * gain
    if norm is not None and norm.centred:
        scaled = scaled - scaled.sum(inputs, keepdim=True) / weight.shape[inputs]
    squares = full_tensor(scaled.square().sum(inputs))
    constant = torch.zeros_like(squares) if bias is None else full_tensor((weight * bias).sum(inputs))
    constant = constant if projection.bias is None else constant + full_tensor(projection.bias.detach())
    return squares + constant.square()


def attention_head_weights(model: nn.Module) -> dict[str, dict[str, HeadWeights]]:
    """The weights of queries and keys of each attention layer of `model`: layer name → part name → `HeadWeights`.

    The model may be unpatched. The parts are "q" and "k"; in multi-head latent attention "dq" and "dkv" (down to the
    latents, one part for all heads), "uq" and "uk" (up from them, per head), "qr" and "kr" (with RoPE; kr is shared).
    Without a latent for the queries there is no "dq".

    Raises ValueError for a model without a layer of a known family, and for projections without a plain weight.
    """
    return {
        name: (_latent_parts if family.latent else _parts)(name, layer, family, input_norm(model, name, layer, family))
        for name, layer, family in attention_layers(model)
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

    `factors` are those of parts, `[heads]`, or `[2, heads]` for weights and for biases. Other outputs have the factor
    1. Projections without a factor are left out.
    """
    vectors: dict[Any, Tensor] = {}
    for name, factor in factors.items():
        part = parts[name]
        vector = vectors.setdefault(part.projection, factor.new_ones(2, _size(part.projection)))
        vector[:, part.outputs(vector.device)] = factor.expand(2, -1)[..., None]
    for projection, (weights, biases) in vectors.items():
        for p in projection.parameters(recurse=False):
            yield p, _beside(weights.unsqueeze(_inputs(projection)) if p.dim() == 2 else biases, p)


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


def _parts(name: str, layer: Any, family: Family, norm: InputNorm | None) -> dict[str, HeadWeights]:
    style = family.style
    heads, heads_kv, dim = style.heads(layer)
    if len(style.weights) > 1:  # the query projection may hold a gate, and heads may differ by layer
        q, k = (_projection(name, layer, part) for part in style.weights[:2])
        heads_kv = _size(k) // dim
        heads = heads_kv * getattr(layer, "num_key_value_groups", 1)
        return {
            "q": HeadWeights(q, heads, dim, _size(q) // heads, norm=norm),
            "k": HeadWeights(k, heads_kv, dim, dim, norm=norm),
        }
    fused = _projection(name, layer, style.weights[0])
    stride, keys = (3 * dim, dim) if style.interleaved(layer) else (dim, heads * dim)
    return {
        "q": HeadWeights(fused, heads, dim, stride, norm=norm),
        "k": HeadWeights(fused, heads_kv, dim, stride, keys, norm),
    }


def _latent_parts(name: str, layer: Any, family: Family, norm: InputNorm | None) -> dict[str, HeadWeights]:
    plain, turned, latent = layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.kv_lora_rank
    has_latent = getattr(layer, "q_a_proj", None) is not None  # for the queries
    q = _projection(name, layer, "q_b_proj" if has_latent else "q_proj")
    down, up = (_projection(name, layer, part) for part in ("kv_a_proj_with_mqa", "kv_b_proj"))
    q_norm, k_norm = InputNorm(layer.q_a_layernorm) if has_latent else norm, InputNorm(layer.kv_a_layernorm)
    head_dim = plain + turned
    heads = _size(q) // head_dim
    parts = {
        "uq": HeadWeights(q, heads, plain, head_dim, norm=q_norm),
        "qr": HeadWeights(q, heads, turned, head_dim, plain, q_norm),
        "dkv": HeadWeights(down, 1, latent, latent, norm=norm),
        "kr": HeadWeights(down, 1, turned, turned, latent, norm),
        "uk": HeadWeights(up, heads, plain, _size(up) // heads, norm=k_norm),
    }
    if has_latent:
        width = layer.q_lora_rank
        parts["dq"] = HeadWeights(_projection(name, layer, "q_a_proj"), 1, width, width, norm=norm)
    return parts


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
    if not isinstance(projection, nn.Linear | Conv1D):
        raise ValueError(
            f"{name}.{part} is a {type(projection).__module__}.{type(projection).__name__}: expected torch's Linear "
            "or transformers' Conv1D, whose outputs belong to heads. Merge adapters first"
        )
    if not isinstance(projection.weight, nn.Parameter):
        raise ValueError(
            f"{name}.{part} has no parameter as its weight, and a change of the weight would be lost: end its "
            "parametrization (torch.nn.utils.parametrize) before, and shard by FSDP2 (fully_shard) in place of FSDP 1"
        )
    weight = projection.weight
    if type(weight) not in PLAIN or weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(
            f"{name}.{part} has a {type(weight).__name__} of shape {list(weight.shape)} and {weight.dtype} as its "
            "weight, expected a Parameter of floating point and two dimensions: do not quantise it, and shard it by "
            "FSDP2 (fully_shard), which keeps its shape"
        )
    return projection
