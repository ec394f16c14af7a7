"""The norm whose result a projection takes as its input: where it is in a model, its gain and its bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from hf_qknorm.families import Family
from hf_qknorm.measure.distributed import full_tensor
from hf_qknorm.ops.norms import NORMS

# names in the decoder layer of a norm whose result other modules read too, so that no scheme can fold it away
SHARED_NORMS: Final = (
    "input_layernorm", "attn_norm", "self_attn_layer_norm", "norm_1", "norm", "LayerNorm", "ln_1", "ln_attn",
)  # fmt: skip

GainAndBias = tuple[Tensor | None, Tensor | None]  # None for 1 and for 0


@dataclass(frozen=True)
class InputNorm:
    """A norm with the result g·x̂ + β: x̂ has a mean square of 1, and mean 0 if `centred`.

    g is the module's weight, with 1 added if `plus_one`; 1 without a weight. β is its bias; 0 without one.
    """

    module: Any
    centred: bool = False
    plus_one: bool = False

    def gain_and_bias(self) -> GainAndBias:
        """g and β, `[C]` in fp32 at least; every rank must call this."""
        gain, bias = (_values(getattr(self.module, name, None)) for name in ("weight", "bias"))
        return (gain + 1 if gain is not None and self.plus_one else gain), bias


def input_norm(model: nn.Module, name: str, layer: Any, family: Family) -> InputNorm | None:
    """The norm in front of the attention layer `name`, if its result is the layer's input; else None.

    None stands for a norm behind the layer before (BERT, OLMo 2), for any in encoder-decoders and their decoders, for a
    norm that a scheme removed, and for any in a model that norms its queries and keys.
    """
    if family.has_norms(getattr(layer, "config", None)):  # the lengths of the projections' outputs do not matter
        return None
    if family.style.project_across is not None:  # the norms of an encoder and of a decoder go by the same names
        return None
    path = name.rpartition(".")[0]
    owner: Any = model.get_submodule(path)
    index = int(name.rpartition(".")[2]) if isinstance(owner, nn.ModuleList) else None
    if index is not None:  # LongCat: two attention layers in each decoder layer
        owner = model.get_submodule(path.rpartition(".")[0])
    if not getattr(owner, "do_layer_norm_before", True):  # OPT-350m
        return None
    names = (family.pre_norm,) if family.pre_norm else SHARED_NORMS
    norm = next((module for x in names if (module := owner._modules.get(x)) is not None), None)
    norm = norm[index] if isinstance(norm, nn.ModuleList) and index is not None else norm
    if norm is None or isinstance(norm, nn.Identity):
        return None
    return InputNorm(norm, NORMS[family.norm].centred, family.gain_plus_one)


def _values(parameter: Tensor | None) -> Tensor | None:
    """A parameter with all shards, in fp32 at least."""
    if parameter is None:
        return None
    return full_tensor(parameter.detach()).to(torch.promote_types(parameter.dtype, torch.float32))
