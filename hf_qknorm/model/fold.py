"""Fold the norm before attention into the projections, for schemes with `pre_norm=False`.

This norm computes gain·(x − μ)/σ + bias, with μ = 0 for RMSNorm. The projection follows, and then the scheme's norms,
which remove any scale. So the gain (and the centring) goes into the projection's columns, and σ is dropped. This is
exact if neither the norm nor the projection has a bias. A bias would have to grow with σ. It is exact only for inputs
whose σ is the `spread`, the mean σ of a text, by which the columns are divided.

Source: Rybakov et al. 2024 (arXiv 2410.16682), QKV_norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from hf_qknorm.families import Family
from hf_qknorm.model.attention import QKNormAttention, patched_layers
from hf_qknorm.model.weights import check_not_copied, check_unshared
from hf_qknorm.norms import NORMS

PLAIN_WEIGHTS: Final = (nn.Parameter, DTensor)  # a quantiser's tensors lose changes in place, or refuse them


class FoldedNorm(nn.Module):
    """The substitute of a folded norm while the model computes as unpatched: x·spread/σ(x), over the last axis.

    σ is the root mean square of x, about its mean if `centred`, with the norm's own `eps` under the root.
    """

    def __init__(self, eps: float, centred: bool) -> None:
        super().__init__()
        self.eps, self.centred, self.spread = eps, centred, 1.0

    def sigma(self, x: Tensor) -> Tensor:
        """Return σ of each row, `[..., 1]`, in fp32 at least."""
        y = x if x.dtype == torch.float64 else x.float()
        y = y - y.mean(-1, keepdim=True) if self.centred else y
        return (y.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        return (x * (self.spread / self.sigma(x))).to(x.dtype)


def fold_weight(weight: Tensor, norm_weight: Tensor, family: Family, *, transposed: bool) -> Tensor:
    """Return a projection's weight with the norm's gain (and centring) in its columns; rows if `transposed`."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    columns = weight.to(wide).t() if transposed else weight.to(wide)
    columns = columns * (norm_weight.to(wide) + family.gain_plus_one)
    columns = columns - columns.mean(1, keepdim=True) if NORMS[family.norm].centred else columns
    return (columns.t() if transposed else columns).to(weight.dtype).contiguous()


def fold_bias(weight: Tensor, bias: Tensor, shift: Tensor, *, transposed: bool) -> Tensor:
    """Return a projection's bias plus the norm's bias `shift` projected by the unfolded weight."""
    columns = weight.double().t() if transposed else weight.double()
    return (bias.double() + columns @ shift.double()).to(bias.dtype)


def check_foldable(model: nn.Module, layers: dict[str, nn.Module], family: Family) -> None:
    """Raise ValueError for weights that can't be changed in place, and a norm's bias that no projection can take."""
    parts = [layer.get_submodule(part) for layer in layers.values() for part in family.style.weights]
    check_not_copied(model, "pre_norm=False")
    check_unshared(model, [p for part in parts for p in part.parameters()], "pre_norm=False")
    for name, layer in layers.items():
        norm = getattr(model.get_submodule(name.rpartition(".")[0]), family.pre_norm)
        projections = [layer.get_submodule(part) for part in family.style.weights]
        if any(p.is_meta for part in (norm, *projections) for p in part.parameters()):
            raise ValueError(
                f"{name}: pre_norm=False folds a norm into weights that are not in memory (on the meta device, or "
                "offloaded): load the model whole, and patch it"
            )
        if not all(type(part.weight) in PLAIN_WEIGHTS for part in projections):
            raise ValueError(
                f"{name}: pre_norm=False folds a norm into projections, and one of them has no plain parameter as its "
                "weight: end its parametrization (torch.nn.utils.parametrize) before, and quantise only afterwards"
            )
        shift = getattr(norm, "bias", None)
        if shift is not None and bool(shift.any()) and any(part.bias is None for part in projections):
            raise ValueError(
                f"{name}: its norm has a bias, and its projections have no bias to fold it into. Use a scheme with "
                "pre_norm=True"
            )


@torch.no_grad()
def fold_pre_norms(model: nn.Module, keep: Callable[[Tensor], None]) -> None:
    """Fold every norm that the scheme removed into the projections that follow it, in place, with spread 1.

    `keep` gets each parameter before it is written to.
    """
    for layer in patched_layers(model).values():
        norm: Any = layer.removed_norm[0]
        shift = getattr(norm, "bias", None)
        for part in _projections(layer):
            transposed = isinstance(part, Conv1D)
            if part.bias is not None and shift is not None:
                keep(part.bias)
                part.bias.copy_(fold_bias(part.weight, part.bias, shift, transposed=transposed))
            keep(part.weight)
            part.weight.copy_(fold_weight(part.weight, norm.weight, layer.family, transposed=transposed))
        eps = float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)
        layer.removed_norm = (FoldedNorm(eps, centred=NORMS[layer.family.norm].centred),)


def is_exact(model: nn.Module) -> bool:
    """Whether a folded model's projections have no bias, so that dropping σ is exact."""
    layers = patched_layers(model).values()
    return all(part.bias is None or not part.bias.any() for layer in layers for part in _projections(layer))


@torch.no_grad()
def set_spread(layer: QKNormAttention, spread: float) -> None:
    """Set the σ of the layer's input for which the projections' biases are exact, and scale the weights to it."""
    norm: Any = layer.removed_norm[0]
    for part in _projections(layer):
        part.weight.mul_(norm.spread / spread)
    norm.spread = spread


def _projections(layer: QKNormAttention) -> list[Any]:
    return [layer.get_submodule(part) for part in layer.family.style.weights]
