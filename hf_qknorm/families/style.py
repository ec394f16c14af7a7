"""What a family file says: how one style of attention module projects, rotates, joins its heads, and drops weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

# Queries, keys and values `[B, T, heads, D]`, and whatever else `output` is to get.
Projected = tuple[Any, ...]
Heads = tuple[Tensor, Tensor, Tensor]


def split_heads(module: Any, x: Tensor) -> Tensor:
    """`[B, T, H·D]` to `[B, T, H, D]`."""
    return x.view(*x.shape[:-1], -1, module.head_dim)


def rotate(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, cache: Any, **arguments: Any) -> Heads:
    """RoPE by the modelling file's own function, if the model has positions for it."""
    if positions is not None:
        q, k = module.modelling.apply_rotary_pos_emb(q, k, *positions)
    return q, k, v


def _rotates(module: Any) -> bool:
    return True


def _eager(module: Any) -> Callable[..., Any]:
    return module.modelling.eager_attention_forward


def _dropout(module: Any) -> float:
    return module.attention_dropout


def _heads(module: Any) -> tuple[int, int, int]:
    heads: int = module.config.num_attention_heads
    heads_kv = heads // getattr(module, "num_key_value_groups", 1)  # a config may say what the model ignores
    head_dim: int = module.head_dim if hasattr(module, "head_dim") else module.head_size
    return heads, heads_kv, head_dim


def _slot(module: Any, **arguments: Any) -> int:
    return module.layer_idx


def _scale(module: Any) -> float:
    return module.scaling


def _length(module: Any) -> int:
    return module.config.max_position_embeddings


def _query_scale(module: Any) -> float:
    return 1.0


def _interleaved(module: Any) -> bool:
    return False


@dataclass(frozen=True)
class Style:
    """How a kind of attention module differs from the shared forward.

    `project` maps hidden states `[B, T, C]` to q `[B, T, H, D]` and k, v `[B, T, Hk, D]`, with the model's own norms
    in front of RoPE on them; what it returns beyond these, `output` gets. `output` maps `[B, T, H·D]` back to
    `[B, T, C]`. `weights` are the projections that lead to q, k and v.

    `rotate` makes heads `[B, H or Hk, T, D]` ready for the cache: RoPE, and whatever the model does after it. It gets
    the position embeddings, the cache, and the other arguments of the forward. `rotates` says whether a layer takes
    position embeddings at all. `expand` makes keys and values of what is cached, where that is something else; it gets
    the other arguments too.

    `dropout` is the rate on the weights; `eager` the model's own function for `attn_implementation="eager"`; `heads`
    the number of query heads, of key heads, and D; `slot` a layer's place in the cache; `scale` what the model
    multiplies q·k by; `length` that of its longest sequence; `query_scale` the largest factor by which `rotate`
    multiplies a query for its position. `prescaled` says that the model multiplies the queries by the scale of the
    logits, and not the logits. `interleaved` says of a fused projection whether its outputs are ordered by head (the
    first head's q, k and v, then the second's) instead of all queries, then all keys, then all values.
    """

    project: Callable[[Any, Tensor], Projected]
    output: Callable[..., Tensor]
    weights: tuple[str, ...]
    rotate: Callable[..., Heads] = rotate
    rotates: Callable[[Any], bool] = _rotates
    expand: Callable[..., tuple[Tensor, Tensor]] | None = None
    dropout: Callable[[Any], float] = _dropout
    eager: Callable[[Any], Callable[..., Any]] = _eager
    heads: Callable[[Any], tuple[int, int, int]] = _heads
    slot: Callable[..., int] = _slot
    scale: Callable[[Any], float] = _scale
    length: Callable[[Any], int] = _length
    query_scale: Callable[[Any], float] = _query_scale
    prescaled: bool = False
    interleaved: Callable[[Any], bool] = _interleaved
