"""Norms that have become constant factors: at a knee of ∞, they fold into the projections in front of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_qknorm.measure.head_weights import HeadWeights, attention_head_weights, changeable_head_weights
from hf_qknorm.model.attention import head_norms, require_patched
from hf_qknorm.model.knees import knee_of
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.ops.norms import NORMS
from hf_qknorm.scheme import Scheme


@dataclass(frozen=True)
class ConstantNorm:
    """A norm that multiplies by a constant, and the outputs of the `projection` in front of it.

    One norm of each layer has as its `scale` the scheme's scale of the logits over the model's own; others have 1.
    """

    norm: HeadNorm
    part: HeadWeights
    scale: float

    @property
    def projection(self) -> Any:
        return self.part.projection

    def folded(self, x: Tensor) -> Tensor:
        """Return the projection's weight or bias x with the norm folded in, in fp64."""
        norm, kind, part = self.norm, NORMS[self.norm.norm], self.part
        transposed = x.dim() == 2 and isinstance(part.projection, Conv1D)
        x = x.double().t().clone() if transposed else x.to(torch.float64, copy=True)
        rows = part.outputs(x.device)
        constant = norm.epsilon**-0.5 * norm.length() * self.scale
        gain = x.new_full(rows.shape, constant) * (1.0 if norm.weight is None else norm.weight.double().to(x.device))
        y = x[rows]  # [H, D], with the inputs behind
        y = y - y.mean(1, keepdim=True) if kind.centred else y
        y = y * gain.view(*gain.shape, *[1] * (y.dim() - 2))
        if y.dim() == 2 and norm.bias is not None:
            y = y + self.scale * norm.bias.double().to(x.device)
        x[rows] = y
        return x.t() if transposed else x


def constant_norms(model: nn.Module) -> list[ConstantNorm]:
    """The norms of a patched model, each a constant factor that its projection can take.

    Raises ValueError for a model that is not patched, norms that still act, norms of values or of
    latent attention, a clip in front of the norms, and a bias of a norm whose projection has none.
    """
    layers = require_patched(model)
    check_norms(model)
    found = []
    parts = attention_head_weights(model)
    for name, layer in layers.items():
        if any(norm.ratio < math.inf for norm in head_norms(layer).values()):
            raise ValueError(
                f"the norms still act (knee {knee_of(layer):.3g}): train with KneeSchedule(target=math.inf) "
                "after a calibration, or give remove_norms text, which ends them and measures the cost"
            )
        scale = layer.logit_scale / layer.own_scale
        for name_of_norm, norm in head_norms(layer).items():
            part = parts[name][name_of_norm[0]]
            if norm.bias is not None and bool(norm.bias.any()) and part.projection.bias is None:
                raise ValueError(
                    f"{name}.{name_of_norm} has a bias, and its projection has none to fold it into: train with a "
                    "scheme of bias=False"
                )
            found.append(ConstantNorm(norm, part, scale))
            scale = 1.0
    return found


def check_norms(model: nn.Module) -> None:
    """Raise ValueError unless a patched model norms queries or keys alone, in full, each behind its own projection."""
    first = next(iter(require_patched(model).values()))
    if first.scheme.v is not None or not first.scheme.norms:
        raise ValueError(f"got the scheme {first.scheme}: expected norms of queries and keys alone")
    if first.family.latent:
        raise ValueError(
            "a norm of latent attention has no projection of its own to be folded into: keep the norms of this model"
        )
    if bound := getattr(first, "clip_qkv", None) or getattr(first.config, "clip_qkv", None):
        raise ValueError(
            f"the model clips its queries and keys to ±{bound:g} in front of the norms, which can't be folded past "
            "that: train it without the clip (clip_qkv=None) first"
        )
    changeable_head_weights(model, "folding the norms into the projections")


def without_norms(scheme: Scheme) -> Scheme:
    """The rest of a scheme whose norms, and scale with them, are folded into the projections."""
    return Scheme(softcap=scheme.softcap)
