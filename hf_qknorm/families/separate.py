"""Llama's style, a projection each for queries, keys and values, and what others do to them or to the output."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_qknorm.families.style import Projected, Style, split_heads


def project(module: Any, hidden_states: Tensor) -> Projected:
    return (
        split_heads(module, module.q_proj(hidden_states)),
        split_heads(module, module.k_proj(hidden_states)),
        split_heads(module, module.v_proj(hidden_states)),
    )


def output(module: Any, attended: Tensor) -> Tensor:
    return module.o_proj(attended)


def output_out_proj(module: Any, attended: Tensor) -> Tensor:
    return module.out_proj(attended)


def output_dropped(module: Any, attended: Tensor) -> Tensor:
    """Starcoder 2 and Seed-OSS: dropout behind the projection."""
    return nn.functional.dropout(module.o_proj(attended), p=module.residual_dropout, training=module.training)


def output_normed(module: Any, attended: Tensor) -> Tensor:
    """BitNet: a norm in front of the output projection."""
    return module.o_proj(module.attn_sub_norm(attended))


def output_modernbert(module: Any, attended: Tensor) -> Tensor:
    return module.out_drop(module.Wo(attended))


def project_multiplied(module: Any, hidden_states: Tensor) -> Projected:
    """Falcon-H1: keys times a number of the config's."""
    q, k, v = project(module, hidden_states)
    return q, k * module.key_multiplier, v


def project_clipped(module: Any, hidden_states: Tensor) -> Projected:
    """OLMo: everything clipped, where the config says at what."""
    q, k, v = (getattr(module, name)(hidden_states) for name in ("q_proj", "k_proj", "v_proj"))
    bound = module.config.clip_qkv
    for x in () if bound is None else (q, k, v):
        x.clamp_(min=-bound, max=bound)
    return split_heads(module, q), split_heads(module, k), split_heads(module, v)


def project_mimo(module: Any, hidden_states: Tensor) -> Projected:
    """MiMo: values of another width, times a number of the config's."""
    q = split_heads(module, module.q_proj(hidden_states))
    k = split_heads(module, module.k_proj(hidden_states))
    v = module.v_proj(hidden_states)
    v = v.view(*v.shape[:-1], -1, module.v_head_dim).transpose(1, 2) * module.v_scale
    return q, k, v.transpose(1, 2)


def never(module: Any) -> bool:
    """Whether a layer of a model without RoPE takes position embeddings."""
    return False


def where_it_slides(module: Any) -> bool:
    """Cohere 2: layers with a window rotate, others don't."""
    return module.sliding_window is not None


def where_it_slides_or_must(module: Any) -> bool:
    """Cohere 2 MoE: so do the layers that the config forces to."""
    return module.sliding_window is not None or module.force_rope


def where_told(module: Any) -> bool:
    """SmolLM 3: the config says which layers rotate."""
    return bool(module.use_rope)


QKV = ("q_proj", "k_proj", "v_proj")
SEPARATE = Style(project, output, QKV)
DROPPED = Style(project, output_dropped, QKV)
SUB_NORMED = Style(project, output_normed, QKV)
MODERNBERT = Style(project, output_modernbert, QKV)
MULTIPLIED = Style(project_multiplied, output, QKV)
CLIPPED = Style(project_clipped, output, QKV)
MIMO = Style(project_mimo, output, QKV)
UNROTATED = Style(project, output, QKV, rotates=never)
COHERE2 = Style(project, output, QKV, rotates=where_it_slides)
COHERE2_MOE = Style(project, output, QKV, rotates=where_it_slides_or_must)
SMOLLM3 = Style(project, output, QKV, rotates=where_told)
