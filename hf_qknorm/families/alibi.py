"""Falcon, BLOOM and MPT: inline attention, and ALiBi (Press et al. 2021, arXiv 2108.12409) in the last two.

ALiBi is a bias of the logits, linear in the key's position. A cap is applied before it. The `attend` functions are like
`inline`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_qknorm.families.inline import Attended
from hf_qknorm.families.separate import heads, output_dense, output_out_proj
from hf_qknorm.families.style import Projected, Style, split_heads


def attend_falcon(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Attended:
    logits = q @ k.transpose(-1, -2)
    logits /= math.sqrt(module.head_dim)
    logits = logits if mask is None else logits + mask
    weights = nn.functional.softmax(logits, dim=-1, dtype=v.dtype)
    return (weights @ v).transpose(1, 2), weights


def heads_falcon(module: Any) -> tuple[int, int, int]:
    """The new architecture repeats its keys before the cache."""
    keys = module.num_heads if module.new_decoder_architecture else module.num_kv_heads
    return module.num_heads, keys, module.head_dim


def order_falcon(module: Any) -> bool | None:
    """By head, or queries in front of one key and one value, or in groups of queries with their key and value."""
    return None if module.new_decoder_architecture else not module.multi_query


def project_bloom(module: Any, hidden_states: Tensor) -> Projected:
    return tuple(x.transpose(1, 2) for x in module._reshape(module.query_key_value(hidden_states)))


def attend_bloom(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, alibi: Tensor, **options: Any
) -> Attended:
    shape = q.shape[:3]
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    logits = alibi.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=module.beta, alpha=module.inv_norm_factor)
    logits = logits.view(*shape, -1)
    logits = logits if mask is None else logits + mask
    weights = module.attention_dropout(nn.functional.softmax(logits, dim=-1, dtype=torch.float32).to(q.dtype))
    return torch.bmm(weights.flatten(0, 1), v).view(*shape, -1).transpose(1, 2), weights


def forward_bloom(
    shared: Callable[..., Any], module: Any, hidden_states: Tensor, residual: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """BLOOM: the module adds the residual, too."""
    out, weights = shared(hidden_states, **kwargs)
    return module.modelling.dropout_add(out, residual, module.hidden_dropout, module.training), weights


def unsupported_bloom(config: Any) -> str | None:
    """Return the reason why a model with this config can't be patched, or None."""
    exact = config.pretraining_tp > 1 and config.slow_but_exact
    return "slow_but_exact=True: the module adds its output up from slices of its weight" if exact else None


def project_mpt(module: Any, hidden_states: Tensor) -> Projected:
    qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    return tuple(split_heads(module, x) for x in qkv.chunk(3, dim=2))


def attend_mpt(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, position_bias: Tensor, **options: Any
) -> Attended:
    logits = torch.matmul(q, k.transpose(-1, -2)) * module.softmax_scale + position_bias
    logits = logits.masked_fill(~mask, torch.finfo(q.dtype).min)
    weights = nn.functional.softmax(logits.float(), dim=-1).to(v.dtype)
    weights = nn.functional.dropout(weights, p=module.attn_dropout_p, training=module.training)
    return torch.matmul(weights, v).transpose(1, 2), weights


def bias_mpt(module: Any, q: Tensor, k: Tensor, *, position_bias: Tensor, **options: Any) -> Tensor:
    return position_bias[None, :, :, max(0, position_bias.shape[2] - k.shape[2]) :]


def forward_mpt(
    shared: Callable[..., Any], module: Any, hidden_states: Tensor, position_bias: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """MPT: True in its masks stands for keys that are hidden."""
    mask = ~kwargs.pop("attention_mask")
    return shared(hidden_states, mask, position_bias=position_bias, **kwargs)


FALCON = Style(
    lambda module, hidden_states: module._split_heads(module.query_key_value(hidden_states)),
    output_dense,
    ("query_key_value",),
    inline=True,
    dropout=lambda module: 0.0,  # the model applies none
    eager=lambda module: attend_falcon,
    heads=heads_falcon,
    scale=lambda module: module.inv_norm_factor,
    interleaved=order_falcon,
)
BLOOM = Style(
    project_bloom,
    output_dense,
    ("query_key_value",),
    forward=forward_bloom,
    inline=True,
    dropout=lambda module: module.attention_dropout.p,
    eager=lambda module: attend_bloom,
    bias=lambda module, q, k, *, alibi, **options: alibi.view(q.shape[0], module.num_heads, 1, -1),
    heads=heads,
    scale=lambda module: module.inv_norm_factor,
    length=lambda module: getattr(module.config, "seq_length", 2048),  # in its training
    interleaved=lambda module: True,
)
MPT = Style(
    project_mpt,
    output_out_proj,
    ("Wqkv",),
    forward=forward_mpt,
    inline=True,
    dropout=lambda module: module.attn_dropout_p,
    eager=lambda module: attend_mpt,
    bias=bias_mpt,
    reads_masks=True,
    heads=lambda module: (module.n_heads, module.n_heads, module.head_dim),
    scale=lambda module: module.softmax_scale,
    length=lambda module: module.max_seq_length,
)
