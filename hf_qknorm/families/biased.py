"""Models that norm queries and keys, and add a learned bias to the logits: Inkling and Doge.

The bias is computed from the input or from the values. A cap is applied before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_qknorm.families import normed
from hf_qknorm.families.separate import output
from hf_qknorm.families.style import CACHE, QKV, Projected, Rotated, Style, split_heads


def forward_inkling(
    shared: Callable[..., Any],
    module: Any,
    hidden_states: Tensor,
    *args: Any,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    """Inkling: short convolutions with a state of their own, and a bias by distance that is computed from the input."""
    length, cached = hidden_states.shape[1], past_key_values is not None
    seen = past_key_values.get_query_offset(module.layer_idx) if cached else 0
    keys, first = past_key_values.get_mask_sizes(length, module.layer_idx) if cached else (length, 0)
    places = (torch.arange(n, device=hidden_states.device) + start for n, start in ((length, seen), (keys, first)))
    relative = {"relative_input": hidden_states, "places": tuple(places)}
    arguments = {"past_key_values": past_key_values, "state": past_key_values, **relative, **kwargs}
    return shared(hidden_states, *args, **arguments)


def project_inkling(
    module: Any, hidden_states: Tensor, state: Any = None, conv_mask: Tensor | None = None
) -> Projected:
    arguments = {CACHE: state, "conv_mask": conv_mask}
    q = split_heads(module, module.q_proj(hidden_states))
    k = split_heads(module, module.k_sconv(module.k_proj(hidden_states), **arguments))
    v = split_heads(module, module.v_sconv(module.v_proj(hidden_states), **arguments))
    return module.q_norm(q), module.k_norm(k), v


def rotate_inkling(
    module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, *, places: Any, **arguments: Any
) -> Rotated:
    """Inkling: layers without a window scale queries far into the text."""
    factor = _factor(module, places[0])
    return (q if factor is None else (q.float() * factor).to(q.dtype)), k, v


def _factor(module: Any, places: Tensor) -> Tensor | None:
    """The factor of the queries and of their bias, `[1, 1, T, 1]`."""
    config = module.config
    if module.is_sliding or config.log_scaling_n_floor is None:
        return None
    count = (places + 1).float() / config.log_scaling_n_floor
    return (1.0 + config.log_scaling_alpha * torch.log(count.clamp(min=1.0))).view(1, 1, -1, 1)


def query_scale_inkling(module: Any) -> float:
    """The scale of the queries at the last position."""
    config = module.config
    if module.is_sliding or config.log_scaling_n_floor is None:
        return 1.0
    return 1.0 + config.log_scaling_alpha * math.log(
        max(1.0, config.max_position_embeddings / config.log_scaling_n_floor)
    )


def bias_inkling(
    module: Any, q: Tensor, k: Tensor, *, relative_input: Tensor, places: tuple[Tensor, Tensor], **options: Any
) -> Tensor:
    relative = module.r_proj(relative_input).view(*relative_input.shape[:-1], module.num_heads, -1)
    bias: Tensor = module.rel_logits_proj(relative, *places)
    factor = _factor(module, places[0])
    return bias if factor is None else (bias.float() * factor).to(bias.dtype)


def bias_doge(module: Any, q: Tensor, k: Tensor, *, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """Doge: a number for each value, and for each query the least number for all but the largest of these."""
    values = v.transpose(1, 2).reshape(v.shape[0], v.shape[2], -1)
    weights = torch.exp(module.A * nn.functional.softplus(module.dt_proj(values))).transpose(-1, -2)
    like = q.transpose(1, 2)
    bias = module.prepare_dynamic_mask(like, weights, module.keep_window_size, mask)
    return module.modelling.repeat_kv(bias, module.num_key_value_groups)


def attend_doge(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, position_bias: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """The module's own function takes the bias, which contains the mask, in the mask's place."""
    result: tuple[Tensor, Tensor] = module.modelling.eager_attention_forward(module, q, k, v, position_bias, **options)
    return result


INKLING = Style(
    project_inkling,
    output,
    QKV,
    arguments=("state", "conv_mask"),
    forward=forward_inkling,
    rotate=rotate_inkling,
    rotates=lambda module: False,
    bias=bias_inkling,
    heads=lambda module: (module.num_heads, module.num_key_value_heads, module.head_dim),
    query_scale=query_scale_inkling,
)
DOGE = Style(
    normed.project,
    output,
    QKV,
    eager=lambda module: attend_doge,
    bias=bias_doge,
    reads_masks=True,
)
