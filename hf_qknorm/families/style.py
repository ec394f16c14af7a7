"""`Style`: how a kind of attention module projects, rotates and joins its heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import transformers
from torch import Tensor

# q, k and v `[B, T, heads, D]`, and further arguments for `output`
Projected = tuple[Any, ...]
# q, k and v `[B, heads, T, D]`
Rotated = tuple[Tensor, Tensor, Tensor]

QKV: Final = ("q_proj", "k_proj", "v_proj")
FROM_5_24: Final = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)  # transformers' version
# transformers' name for the cache in a forward. Before 5.24, `cache` was the cache of continuous batching alone.
CACHE: Final = "cache" if FROM_5_24 else "past_key_values"


def add_to_cache(cache: Any, k: Tensor, v: Tensor, slot: int, options: dict[str, Any] | None) -> tuple[Tensor, Tensor]:
    """A layer's keys and values with the new ones, as transformers adds them; a paged cache changes `options`."""
    added = {"kwargs": {} if options is None else options} if FROM_5_24 else {}
    updated: tuple[Tensor, Tensor] = cache.update(k, v, slot, **added)
    return updated


def split_heads(module: Any, x: Tensor) -> Tensor:
    """Reshape `[B, T, H·D]` to `[B, T, H, D]`."""
    return x.view(*x.shape[:-1], -1, module.head_dim)


def project(module: Any, hidden_states: Tensor, weights: tuple[str, ...] = QKV) -> Projected:
    """Apply a projection each for queries, keys and values."""
    shape, modules = (*hidden_states.shape[:-1], -1, module.head_dim), module._modules  # `getattr` takes longer
    return tuple([modules[name](hidden_states).view(shape) for name in weights])


def output(module: Any, attended: Tensor) -> Tensor:
    """Apply the output's projection."""
    return module._modules["o_proj"](attended)


def rotate(module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, **arguments: Any) -> Rotated:
    """Apply RoPE by the modelling file's own function, if the model has position embeddings."""
    if positions is not None:
        q, k = module.modelling.apply_rotary_pos_emb(q, k, *positions)
    return q, k, v


def _heads(module: Any) -> tuple[int, int, int]:
    """The heads of most modules, and their width; 0 for one that has another name."""
    heads: int = module.config.num_attention_heads
    heads_kv = heads // getattr(module, "num_key_value_groups", 1)  # some models ignore the config's number
    head_dim: int = getattr(module, "head_dim", getattr(module, "head_size", 0))
    return heads, heads_kv, head_dim


@dataclass(frozen=True)
class Style:
    """How a kind of attention module differs from Llama's. Every function takes the module first.

    Projections:
    `project` maps hidden states `[B, T, C]` to q `[B, T, H, D]` and k, v `[B, T, Hk, D]`. Its further results go
    to `output`.
    `arguments` are the names of the forward's arguments that `project` takes too, and that nothing else does.
    `project_across` is None, or maps hidden states and an encoder's to q, k and v for cross-attention. Without
    the latter, k and v are None.
    `output` maps the attended heads `[B, T, H·D]` back to `[B, T, C]`.
    `weights` are the names of the projections that compute q, k and v.
    `heads` gives the number of query heads, the number of key heads, and D.
    `interleaved` tells whether a fused projection's outputs are ordered by head (the first head's q, k and v, then the
    second's) instead of all queries, then all keys, then all values.

    The model's own norms of queries and keys, if it has them; its own forward then computes attention:
    `own_norms` are their names. A layer may lack them.
    `norms_together` tells whether they norm all heads of a token together, instead of each head.
    `norms_rotated` tells whether they come after RoPE.

    The forward:
    `forward` is None, or adapts the shared forward to the arguments and results of the model's own: it takes the shared
    forward, the module, and the arguments of the model's own.

    Positions:
    `rotate` applies RoPE to `[B, H or Hk, T, D]`, and the model's own operations between RoPE and the cache. It takes
    the position embeddings, and the other arguments of the forward, `past_key_values` among them.
    `rotates` tells whether the layer uses position embeddings.
    `parts` gives the widths of a head's parts without and with RoPE, in a model that computes and caches them
    separately. `rotate` and `expand` then apply the scheme's norms, to each part by itself; None elsewhere.
    `query_scale` is the largest factor by which `rotate` multiplies a query for its position.
    `length` is the length of the model's longest sequence.

    Cache:
    `slot` is the layer's index in the cache; it takes the other arguments of the forward.
    `expand` computes keys and values from cached tensors of another form; it takes the other arguments too.

    Attention:
    `scale` multiplies q·k. `prescaled`: the model multiplies the queries by it instead of the logits.
    `dropout` is the dropout rate of the attention weights.
    `eager` is the model's own attention function for `attn_implementation="eager"`.
    """

    project: Callable[..., Projected] = project
    output: Callable[..., Tensor] = output
    weights: tuple[str, ...] = QKV
    arguments: tuple[str, ...] = ()
    project_across: Callable[[Any, Tensor, Tensor | None], tuple[Tensor, Tensor | None, Tensor | None]] | None = None
    forward: Callable[..., Any] | None = None
    rotate: Callable[..., Rotated] = rotate
    rotates: Callable[[Any], bool] = lambda module: True
    expand: Callable[..., tuple[Tensor, Tensor]] | None = None
    parts: Callable[[Any], tuple[int, int]] | None = None
    own_norms: tuple[str, str] = ("q_norm", "k_norm")
    norms_together: bool = False
    norms_rotated: bool = False
    dropout: Callable[[Any], float] = lambda module: module.attention_dropout
    eager: Callable[[Any], Callable[..., Any]] = lambda module: module.modelling.eager_attention_forward
    heads: Callable[[Any], tuple[int, int, int]] = _heads
    slot: Callable[..., int] = lambda module, **arguments: module.layer_idx
    scale: Callable[[Any], float] = lambda module: module.scaling
    length: Callable[[Any], int] = lambda module: module.config.max_position_embeddings
    query_scale: Callable[[Any], float] = lambda module: 1.0
    prescaled: bool = False
    interleaved: Callable[[Any], bool] = lambda module: False

    def norm_sizes(self, module: Any) -> dict[str, tuple[int, int]]:
        """The heads and the width that each norm of a scheme takes, by the norm's name in the module."""
        heads, heads_kv, head_dim = self.heads(module)
        values = {"v_norm": (heads_kv, getattr(module, "v_head_dim", head_dim))}
        if self.parts is None:
            return {"q_norm": (heads, head_dim), "k_norm": (heads_kv, head_dim)} | values
        plain, rotated = self.parts(module)
        queries = {"q_norm": (heads, plain), "q_rope_norm": (heads, rotated)}
        return queries | {"k_norm": (heads_kv, plain), "k_rope_norm": (1, rotated)} | values  # all heads share one key
