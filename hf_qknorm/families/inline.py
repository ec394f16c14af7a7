"""Decoders whose attention modules compute attention themselves: GPT-Neo, XGLM and others.

GPT-J and CodeGen are among them before transformers 5.24.

Each `attend` function repeats the model's own computation, for the backend "eager". It takes q `[B, H, T, D]`, k and v
`[B, Hk, S, D]` and the mask, and returns `[B, T, H, D]` and the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_qknorm.families import fused
from hf_qknorm.families.rotary import rotate_part
from hf_qknorm.families.separate import heads, output_dense, output_out_proj
from hf_qknorm.families.style import FROM_5_24, Projected, Rotated, Style, project

Attended = tuple[Tensor, Tensor]


def attend_by_method(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Attended:
    """By the module's own `_attn`, which takes and returns `[B, H, T, D]`."""
    attended, weights = module._attn(q.contiguous(), k.contiguous(), v, mask)
    return attended.transpose(1, 2), weights


def hidden_by(visible: Tensor, q: Tensor) -> Tensor:
    """A bias of 0 for the keys that a query sees, and the least number of its dtype for the others."""
    return torch.zeros((), dtype=q.dtype, device=q.device).where(visible, torch.finfo(q.dtype).min)


def dropped(module: Any, attended: Tensor) -> Tensor:
    """GPT-J and its relatives: dropout after the projection."""
    return module.resid_dropout(module.out_proj(attended))


def attention_heads(module: Any) -> tuple[int, int, int]:
    return module.num_attention_heads, module.num_attention_heads, module.head_dim


def rotate_sinusoidal(
    module: Any, q: Tensor, k: Tensor, v: Tensor, positions: Any, *, position_ids: Any, **arguments: Any
) -> Rotated:
    """GPT-J and CodeGen: the first `rotary_dim` channels rotate, by sines and cosines.

    Before transformers 5.24 the module holds these itself.
    """
    if positions is None:
        if module.embed_positions.device != position_ids.device:
            module.embed_positions = module.embed_positions.to(position_ids.device)
        positions = module.embed_positions[position_ids].to(k.dtype).expand(q.shape[0], -1, -1).chunk(2, dim=-1)
    sin, cos = positions
    q, k = (_rotated(module, x.transpose(1, 2), sin, cos).transpose(1, 2) for x in (q, k))
    return q, k, v


def _rotated(module: Any, x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    turned = module.modelling.apply_rotary_pos_emb(x[..., : module.rotary_dim], sin, cos)
    return torch.cat([turned, x[..., module.rotary_dim :]], dim=-1)


def project_codegen(module: Any, hidden_states: Tensor) -> Projected:
    """CodeGen: four blocks of heads, each with its queries, values and keys."""
    blocks = module.qkv_proj(hidden_states).unflatten(-1, (4, -1))
    q, v, k = (x.unflatten(-1, (-1, module.head_dim)).flatten(2, 3) for x in blocks.chunk(3, dim=-1))
    return q, k, v


def local_bias(module: Any, q: Tensor, k: Tensor, **options: Any) -> Tensor | None:
    """GPT-Neo: local layers see a window of keys, which the model's masks do not contain."""
    if module.attention_type != "local":
        return None
    keys = k.shape[2]
    return hidden_by(module.bias[:, :, keys - q.shape[2] : keys, :keys], q)


def project_openai(module: Any, hidden_states: Tensor) -> Projected:
    shape = (*hidden_states.shape[:-1], module.n_head, -1)
    return tuple(x.view(shape) for x in module.c_attn(hidden_states).split(module.split_size, dim=2))


def attend_openai(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Attended:
    attended, weights = module._attn(q, k.transpose(-1, -2), v, mask, output_attentions=True)
    return attended.transpose(1, 2), weights


def causal_bias(module: Any, q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """OpenAI GPT: its masks hold padding alone, and the module is causal by itself."""
    return hidden_by(module.bias[:, :, : q.shape[2], : k.shape[2]] > 0, q)


def forward_openai(
    shared: Callable[..., Any],
    module: Any,
    x: Tensor,
    attention_mask: Tensor | None = None,
    output_attentions: Any = False,
) -> list[Tensor]:
    out, weights = shared(x, attention_mask, output_attentions=output_attentions)
    return [out, weights] if output_attentions else [out]


def attend_in_batch(
    module: Any, q: Tensor, k: Tensor, v: Tensor, *, weigh: Callable[[Tensor], Tensor], dropout: float = 0.0
) -> Attended:
    """As models that fold the heads into the batch; `weigh` maps logits `[B, H, T, S]` to weights."""
    shape = q.shape[:3]
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    weights = weigh(torch.bmm(q, k.transpose(1, 2)).view(*shape, -1))
    dropped = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.bmm(dropped.flatten(0, 1), v).view(*shape, -1).transpose(1, 2), weights


def attend_xglm(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0, **options: Any
) -> Attended:
    def weigh(logits: Tensor) -> Tensor:
        if mask is not None:
            least = torch.full((), torch.finfo(logits.dtype).min, device=logits.device)
            logits = torch.max(logits + mask, least)
        wide = torch.float32 if logits.dtype == torch.float16 else logits.dtype
        return nn.functional.softmax(logits, dim=-1, dtype=wide).to(logits.dtype)

    return attend_in_batch(module, q, k, v, weigh=weigh, dropout=dropout)


def attend_xlm(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: float = 0.0, **options: Any
) -> Attended:
    logits = torch.matmul(q / math.sqrt(module.head_dim), k.transpose(2, 3))
    logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    weights = nn.functional.softmax(logits.float(), dim=-1).type_as(logits)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, v).transpose(1, 2), weights


def forward_xlm(
    shared: Callable[..., Any],
    module: Any,
    x: Tensor,
    mask: Tensor,
    cache: Any = None,
    output_attentions: bool = False,
    past_key_values: Any = None,
) -> tuple[Tensor, ...]:
    """XLM: a mask `[B, S]`, or where the model is causal `[B, T, S]`, of the keys to see."""
    visible = (mask != 0)[:, None] if mask.dim() == 3 else (mask != 0)[:, None, None].expand(-1, -1, x.shape[1], -1)
    cache = past_key_values if cache is None else cache
    out, weights = shared(x, visible, past_key_values=cache, output_attentions=output_attentions)
    return (out, weights) if output_attentions else (out,)


def forward_japanese(shared: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """GPT-NeoX Japanese: the layer adds the bias of the module's output."""
    return *shared(*args, **kwargs), module.dense_bias


GPTJ = Style(output=dropped, rotate=rotate_sinusoidal, heads=attention_heads)
if not FROM_5_24:
    GPTJ = replace(
        GPTJ,
        inline=True,
        dropout=lambda module: module.attn_dropout.p,
        eager=lambda module: attend_by_method,
        scale=lambda module: 1.0 / module.scale_attn,
    )
CODEGEN = replace(GPTJ, project=project_codegen, weights=("qkv_proj",), interleaved=lambda module: None)
GPT_NEO = Style(
    output=dropped,
    inline=True,
    dropout=lambda module: module.attn_dropout.p,
    eager=lambda module: attend_by_method,
    bias=local_bias,
    heads=heads,
    slot=lambda module, **arguments: module.layer_id,
    scale=lambda module: 1.0,
)
OPENAI = Style(
    project_openai,
    fused.output_c_proj,
    ("c_attn",),
    forward=forward_openai,
    inline=True,
    dropout=lambda module: module.attn_dropout.p,
    eager=lambda module: attend_openai,
    bias=causal_bias,
    heads=lambda module: (module.n_head, module.n_head, module.split_size // module.n_head),
    scale=lambda module: (module.split_size // module.n_head) ** -0.5 if module.scale else 1.0,
    length=lambda module: module.n_positions,
)
XGLM = Style(
    output=output_out_proj,
    inline=True,
    dropout=lambda module: module.dropout,
    eager=lambda module: attend_xglm,
    heads=heads,
    prescaled=True,
)
JAPANESE = Style(
    fused.project_neox,
    output_dense,
    ("query_key_value",),
    forward=forward_japanese,
    inline=True,
    rotate=rotate_part,
    dropout=lambda module: module.attention_dropout.p,
    eager=lambda module: attend_by_method,
    heads=lambda module: (module.num_attention_heads, module.num_attention_heads, module.head_size),
    scale=lambda module: 1.0 / module.norm_factor,
    interleaved=lambda module: True,
)
WEIGHTS_XLM = ("q_lin", "k_lin", "v_lin")
XLM = Style(
    partial(project, weights=WEIGHTS_XLM),
    lambda module, attended: module.out_lin(attended),
    WEIGHTS_XLM,
    forward=forward_xlm,
    inline=True,
    dropout=lambda module: module.dropout,
    eager=lambda module: attend_xlm,
    heads=lambda module: (module.n_heads, module.n_heads, module.head_dim),
    slot=lambda module, **arguments: module.layer_id,
    scale=lambda module: module.head_dim**-0.5,
)
