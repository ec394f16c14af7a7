"""Models that norm their queries and keys by themselves, and run their own forward: where their norms are.

Nothing here computes: bounds, statistics and the weights of heads read it.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_qknorm.families.separate import has_window
from hf_qknorm.families.style import Style


def query_scale_beam(module: Any) -> float:
    """The scale of the queries at the last position, in layers without RoPE."""
    if module.config.rope_parameters[module.config.layer_types[module.layer_idx]] is not None:
        return 1.0
    place = torch.tensor([[module.config.max_position_embeddings - 1]])
    return float(module.modelling.compute_attention_scaling(place))


def query_scale_inkling(module: Any) -> float:
    """The scale of the queries at the last position, in layers without a window."""
    config = module.config
    if module.is_sliding or config.log_scaling_n_floor is None:
        return 1.0
    count = torch.tensor(config.max_position_embeddings / config.log_scaling_n_floor)
    return float(1.0 + config.log_scaling_alpha * torch.log(count.clamp(min=1.0)))


HEADS = Style()
TOGETHER = Style(norms_together=True)
ROTATED = Style(norms_rotated=True)
HUNYUAN = Style(own_norms=("query_layernorm", "key_layernorm"), norms_rotated=True)
LFM2 = Style(own_norms=("q_layernorm", "k_layernorm"))
WINDOWED = Style(rotates=has_window)  # RoPE in layers with a sliding window alone
EXAONE4 = Style(rotates=lambda module: module.sliding_window is None or module.is_sliding)
AFMOE = Style(rotates=lambda module: module.is_local_attention)
BEAM = Style(query_scale=query_scale_beam)
INKLING = Style(
    rotates=lambda module: False,
    heads=lambda module: (module.num_heads, module.num_key_value_heads, module.head_dim),
    query_scale=query_scale_inkling,
)
# One module norms queries and keys together, so that no bound is computed from it.
ZAYA = Style(weights=("qkv_proj.q_proj", "qkv_proj.k_proj", "qkv_proj.v_proj_current", "qkv_proj.v_proj_delayed"))
