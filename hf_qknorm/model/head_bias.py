"""`HeadBias`: one learned number for each query head of a layer, its log temperature or the logit of its sink."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from hf_qknorm.ops.types import Norm

# Far below the largest logit of most queries, so that it takes next to nothing. Adam's ε hides the gradient of a lower
# one (recipes/results/sinks.md).
SINK_START: Final = -10.0

# The `HeadBias` of a layer by name: the field of the scheme that adds it, and its initial value. Models with sinks of
# their own hold them as `sinks`.
HEAD_BIASES: Final = {"temperature": ("temperature", 0.0), "sink": ("sinks", SINK_START)}


class HeadBias(nn.Module):
    """One learned number for each query head, as `bias` `[H]`: Trainer's weight decay leaves out such names."""

    def __init__(
        self, heads: int, initial: float, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.initial = initial
        self.bias = nn.Parameter(torch.full((heads,), initial, device=device, dtype=dtype))

    def forward(self) -> Tensor:
        """Return the numbers of this rank's heads; the parameter is a DTensor under tensor parallelism.

        A call of the module runs its hooks, which load offloaded or sharded parameters.
        """
        bias: Tensor = self.bias.to_local() if hasattr(self.bias, "to_local") else self.bias
        return bias

    def factor(self) -> Tensor:
        """Return exp(bias) `[H]` in fp32 at least: a factor that is always positive, and 1 for a bias of 0."""
        bias: Tensor = self()
        return bias.to(torch.promote_types(bias.dtype, torch.float32)).exp()

    def extra_repr(self) -> str:
        return f"heads={len(self.bias)}"


def scaled_heads(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply heads x `[B, H, T, D]` by a `factor` `[H]`, rounded once."""
    return (x * factor[:, None, None]).to(x.dtype)


def scaled_norm(norm: Norm, factor: Tensor, head_dim: int) -> Norm:
    """Return a norm, not in a blend, with its gain and bias multiplied by a `factor` for each head `[H]`."""
    rows = factor[:, None].expand(-1, head_dim)
    gain = rows.contiguous() if norm.gain is None else rows * norm.gain
    return norm._replace(gain=gain, bias=None if norm.bias is None else rows * norm.bias)
