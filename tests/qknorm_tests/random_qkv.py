"""Random inputs for attention."""

import torch
from torch import Tensor


def make_qkv(
    batch: int,
    heads: int,
    heads_kv: int,
    queries: int,
    keys: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    spread: float = 1.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q `[B, H, T, D]`, k and v `[B, Hk, S, D]` with gradients; `spread` is the deviation of q and k."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, length: int, factor: float) -> Tensor:
        x = torch.randn(batch, heads, length, head_dim, generator=generator, dtype=torch.float64) * factor
        return x.to(dtype).requires_grad_()

    return draw(heads, queries, spread), draw(heads_kv, keys, spread), draw(heads_kv, keys, 1.0)
