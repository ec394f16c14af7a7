"""Sparse attention: an indexer selects the keys that each query sees, and the mask hides the others.

An indexer has projections and a cache of its own. Norms and a cap change the logits of the selected keys, and not the
selection.

Source: DeepSeek-AI 2025 (arXiv 2512.02556); layers that share a selection: arXiv 2603.12201.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_qknorm.families import gated, latent, normed
from hf_qknorm.families.style import CACHE, Projected, Style


def dense(module: Any) -> bool:
    """Whether the backend takes the selection as a mask; the others take the indices of the selected keys."""
    name: str = module.config._attn_implementation
    return name in ("eager", "sdpa") or name.startswith("hf_qknorm")


def hide(mask: Tensor, hidden: Tensor) -> Tensor:
    """The mask, boolean or additive, without the keys where `hidden` is true."""
    return mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


def forward(
    shared: Callable[..., Any],
    module: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Any,
    past_key_values: Any = None,
    prev_topk_indices: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """DeepSeek V3.2: the indexer reads the latent of the queries.

    In models whose layers share a selection, the module returns it too, and may have no indexer.
    """
    compressed = module.q_a_proj(hidden_states)
    queries = module.q_a_layernorm(compressed)
    if hasattr(module, "q_lora_scale"):
        queries = queries * module.q_lora_scale
    chosen = prev_topk_indices
    if module.indexer is not None:
        inputs = hidden_states, queries, position_embeddings, attention_mask[:, 0], kwargs.get("position_ids")
        chosen = module.indexer(*inputs, **{CACHE: past_key_values})
    if chosen is not None and dense(module):
        rest = torch.ones(attention_mask[:, 0].shape, dtype=torch.bool, device=chosen.device)
        attention_mask = hide(attention_mask, rest.scatter(-1, chosen.long(), False)[:, None])
    elif chosen is not None:
        kwargs["indices"] = chosen
    result = shared(
        hidden_states, attention_mask, position_embeddings, past_key_values, latents=(queries, compressed), **kwargs
    )
    return (*result, chosen) if hasattr(module, "skip_topk") else result


def project(module: Any, hidden_states: Tensor, latents: tuple[Tensor, Tensor]) -> Projected:
    return latent.with_latent(module, module.q_b_proj(latents[0]), hidden_states)


def project_axk2(module: Any, hidden_states: Tensor, latents: tuple[Tensor, Tensor]) -> Projected:
    """A.X K2: one projection of the latent, with its norm and without, for the queries and the output's gate."""
    widths = [module.qk_head_dim, module.v_head_dim]
    both = module.q_gate_proj(torch.cat(latents, dim=-1)).view(*hidden_states.shape[:-1], -1, sum(widths))
    q, gate = torch.split(both, widths, dim=-1)
    gate = gate.reshape(*hidden_states.shape[:-1], -1)
    return *latent.with_latent(module, q.flatten(-2), hidden_states), gate


def output_axk2(module: Any, attended: Tensor, gate: Tensor) -> Tensor:
    return module.o_proj((attended * torch.sigmoid(gate.float())).to(attended.dtype))


def forward_hy_v4(shared: Callable[..., Any], module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """HY 4: a gate for the output, which the model computes first."""
    return forward(shared, module, hidden_states, *args, gate=module.gate_proj(hidden_states), **kwargs)


def project_hy_v4(module: Any, hidden_states: Tensor, latents: tuple[Tensor, Tensor], gate: Tensor) -> Projected:
    return *project(module, hidden_states, latents), gate


def project_dots3(module: Any, hidden_states: Tensor, latents: tuple[Tensor, Tensor]) -> Projected:
    """Dots 3 Note: latents are multiplied by numbers, and the key that rotates has a norm of its own."""
    q, k, v = project(module, hidden_states, latents)
    return q, k * module.kv_lora_scale, module.k_rope_only_layernorm(v), hidden_states


def output_dots3(module: Any, attended: Tensor, hidden_states: Tensor) -> Tensor:
    """Dots 3 Note: a gate for each head."""
    gate = module.g_proj(hidden_states).unsqueeze(-1).sigmoid()
    return module.o_proj((attended.view(*attended.shape[:-1], -1, module.v_head_dim) * gate).flatten(-2))


def forward_minimax_m3(
    shared: Callable[..., Any],
    module: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Any,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    """MiniMax M3: some layers have an indexer, which selects blocks of keys for each key head."""
    if module.indexer is not None:
        batch, length = hidden_states.shape[:2]
        places = kwargs["position_ids"]
        places = (places if places.ndim > 1 else places.unsqueeze(0)).expand(batch, -1)
        cached = past_key_values is not None
        keys = past_key_values.get_mask_sizes(length, module.layer_idx)[0] if cached else length
        chosen = module.indexer(hidden_states, position_embeddings, past_key_values, places)
        if dense(module):
            like = hidden_states.dtype, hidden_states.device
            attention_mask = module.indexer.build_block_mask(chosen, attention_mask, keys, *like, places)
        else:
            kwargs["block_indices"] = chosen
    return shared(hidden_states, attention_mask, position_embeddings, past_key_values, **kwargs)


def forward_qwen4(
    shared: Callable[..., Any],
    module: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    """Qwen 4: the indexer takes the position embeddings of all keys."""
    chosen = module.indexer(hidden_states, position_embeddings, attention_mask, past_key_values)
    positions = tuple(x[:, -hidden_states.shape[1] :] for x in position_embeddings)
    added = chosen.is_floating_point()  # with an additive mask, in transformers before 5.18
    mask = attention_mask + chosen if added else hide(attention_mask, ~chosen)
    return shared(hidden_states, mask, positions, past_key_values, **kwargs)


COMMON: dict[str, Any] = latent.COMMON | {"forward": forward, "arguments": ("latents",), "reads_masks": True}
DEEPSEEK_V32 = Style(project, rotate=latent.rotate_pairs, **COMMON)
AXK2 = replace(DEEPSEEK_V32, project=project_axk2, output=output_axk2)
DOTS3 = replace(
    DEEPSEEK_V32,
    project=project_dots3,
    output=output_dots3,
    heads=lambda module: (module.num_heads, module.num_heads, module.qk_head_dim),
)
HY_V4 = replace(
    DEEPSEEK_V32,
    project=project_hy_v4,
    output=gated.output_gated,
    forward=forward_hy_v4,
    arguments=("latents", "gate"),
    rotate=latent.rotate,
)
MINIMAX_M3 = replace(normed.QWEN3, forward=forward_minimax_m3, reads_masks=True)
QWEN4 = replace(gated.QWEN3_NEXT, forward=forward_qwen4, reads_masks=True)
