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
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.fold import PLAIN_WEIGHTS
from hf_qknorm.model.install import own_layers
from hf_qknorm.model.weights import check_not_copied, check_unshared


class InputNorm(NamedTuple):
    """The norm whose result g·x̂ + β a projection takes, where x̂ has a mean square of 1; without a module, x̂ itself."""

    module: Any = None
    gain_plus_one: bool = False

    def gain_and_bias(self) -> tuple[Tensor, Tensor]:
        """g and β, `[C]`, or `[1]` for all inputs, in fp32 at least; every rank must call this."""
        found = [getattr(self.module, name, None) for name in ("weight", "bias")]
        gain, bias = (None if x is None else _wide(full_tensor(x.detach())) for x in found)
        gain = torch.ones(1) if gain is None else gain + self.gain_plus_one
        return gain, torch.zeros(1) if bias is None else bias


@dataclass(frozen=True)
class HeadWeights:
    """The heads' queries, or keys, in a projection: head h has the `width` outputs from `begin` + h·`stride` on."""

    projection: Any
    heads: int
    width: int
    stride: int
    begin: int = 0
    norm: InputNorm = InputNorm()

    @property
    def weight(self) -> Tensor:
        """The projection's present weight; sharding replaces a model's parameters."""
        return self.projection.weight

    def outputs(self, device: torch.device) -> Tensor:
        """The indices of each head's outputs, `[heads, width]`."""
        head, place = (torch.arange(n, device=device) for n in (self.heads, self.width))
        return self.begin + self.stride * head[:, None] + place


class Sizes(NamedTuple):
    """The root mean square of an input's entries, and of the lengths of each head's outputs, `[heads]`."""

    inputs: Tensor
    outputs: Tensor


@torch.no_grad()
def sizes(parts: dict[str, HeadWeights]) -> dict[str, Sizes]:
    """The present sizes of a layer's parts, in fp32 at least, over inputs g·x̂ + β with isotropic x̂.

    The outputs' are √(‖W·diag(g)‖² + ‖W·β + b‖²). With sharded weights every rank must call this.
    """
    norms = {part.norm: part.norm.gain_and_bias() for part in parts.values()}
    squares = {part.projection: _mean_squares(part.projection, *norms[part.norm]) for part in parts.values()}
    found = {}
    for name, part in parts.items():
        (gain, bias), outputs = norms[part.norm], squares[part.projection]
        inputs = (gain.square().mean() + bias.square().mean()).sqrt()
        found[name] = Sizes(inputs, outputs[part.outputs(outputs.device)].sum(1).sqrt())
    return found


def _mean_squares(projection: Any, gain: Tensor, bias: Tensor) -> Tensor:
    """The mean square of each output of a projection, `[outputs]`, over the inputs that `sizes` describes."""
    dim, weight = _inputs(projection), _wide(projection.weight.detach())
    gain, bias = (_beside(x.unsqueeze(1 - dim), weight) for x in (gain, bias))
    constant = full_tensor((weight * bias).sum(dim))
    if projection.bias is not None:
        constant = constant + full_tensor(projection.bias.detach())
    return full_tensor((weight * gain).square_().sum(dim)) + constant.square()


def _wide(x: Tensor) -> Tensor:
    """The tensor in fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def attention_head_weights(model: nn.Module) -> dict[str, dict[str, HeadWeights]]:
    """The weights of queries and keys of each attention layer of `model`: layer name → part name → `HeadWeights`.

    The model may be unpatched. The parts are "q" and "k"; in multi-head latent attention "dq" and "dkv" (down to the
    latents, one part for all heads), "uq" and "uk" (up from them, per head), "qr" and "kr" (with RoPE; kr is shared).
    Without a latent for the queries there is no "dq".

    Raises ValueError for a model without a layer of a known family, and for projections without a plain weight.
    """
    return {
        name: (_latent_parts if family.latent else _parts)(name, layer, family, _input_norm(model, name, layer, family))
        for name, layer, family in attention_layers(model)
    }


def _input_norm(model: nn.Module, name: str, layer: Any, family: Family) -> InputNorm:
    """The norm in front of an attention layer: the first in its decoder layer.

    None counts behind the layer before (BERT, OLMo 2, OPT-350m), in an encoder-decoder, in a model that norms its
    queries and keys, or with several attention layers in a decoder layer (LongCat); nor one that a scheme removed.
    """
    owner: Any = model.get_submodule(name.rpartition(".")[0])
    named = (module for x, module in owner.named_children() if "norm" in x.lower() or x.startswith("ln_"))
    after = family.has_norms(getattr(layer, "config", None)) or not getattr(owner, "do_layer_norm_before", True)
    found = None if after or family.style.project_across is not None else next(named, None)
    return InputNorm() if isinstance(found, nn.Identity | None) else InputNorm(found, family.gain_plus_one)


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


def _parts(name: str, layer: Any, family: Family, norm: InputNorm) -> dict[str, HeadWeights]:
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


def _latent_parts(name: str, layer: Any, family: Family, norm: InputNorm) -> dict[str, HeadWeights]:
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
        q_down = _projection(name, layer, "q_a_proj")
        parts["dq"] = HeadWeights(q_down, 1, _size(q_down), _size(q_down), norm=norm)
    return parts


def _size(projection: Any) -> int:
    """The number of a projection's outputs."""
    return projection.weight.shape[1 - _inputs(projection)]


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
    if not whole or not isinstance(weight, nn.Parameter) or type(weight) not in PLAIN_WEIGHTS:
        held = "" if weight is None else f" with a {type(weight).__name__} {list(weight.shape)} of {weight.dtype}"
        kind = type(projection)
        raise ValueError(
            f"{name}.{part} is a {kind.__module__}.{kind.__name__}{held}: expected torch's Linear or transformers' "
            "Conv1D with a Parameter of floating point and two dimensions, whose outputs belong to heads. Merge "
            "adapters first, end parametrizations and do not quantise it; shard by FSDP2 (fully_shard)"
        )
    return projection
