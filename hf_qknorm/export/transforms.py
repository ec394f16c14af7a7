"""Steps on the way from the tensors of a patched Llama, Mistral, Mixtral, Phi-3 or Qwen 2 to those of another model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_qknorm.export.tensor_plan import Draft
from hf_qknorm.ops import norms
from hf_qknorm.scheme import Scheme

KINDS = ("weight", "bias")
NORMS = ("input_layernorm", "post_attention_layernorm")  # of a layer, in front of attention and MLP


def head_dim(config: Any) -> int:
    """The size of a head; where a config does not say it, or a model does not ask it, hidden_size is divided."""
    said = None if config.base_model_type == "gpt_neox" else getattr(config, "head_dim", None)
    return said or int(config.hidden_size // config.num_attention_heads)


def biased(config: Any) -> bool:
    """Whether the projections of q, k and v have biases."""
    return config.base_model_type == "qwen2" or getattr(config, "attention_bias", False)


def scale_factor(config: Any, scheme: Scheme) -> float:
    """The scheme's scale of q·k, in units of the unpatched model's."""
    if scheme.scale is None:
        return 1.0
    return float(scheme.scale * getattr(config, "query_pre_attn_scalar", head_dim(config)) ** 0.5)


def attention(layer: int) -> str:
    return f"model.layers.{layer}.self_attn."


def split_fused(draft: Draft, config: Any, scheme: Scheme) -> None:
    """Phi-3's qkv_proj and gate_up_proj, each one after the other, become projections of their own."""
    if config.base_model_type != "phi3":
        return
    queries, keys = (heads * head_dim(config) for heads in (config.num_attention_heads, config.num_key_value_heads))
    mlp = config.intermediate_size
    for layer in range(config.num_hidden_layers):
        _split(draft, f"{attention(layer)}qkv_proj", {"q_proj": queries, "k_proj": keys, "v_proj": keys})
        _split(draft, f"model.layers.{layer}.mlp.gate_up_proj", {"gate_proj": mlp, "up_proj": mlp})


def _split(draft: Draft, fused: str, rows: dict[str, int]) -> None:
    read, (_, columns) = draft.reader(f"{fused}.weight"), draft.parts[f"{fused}.weight"].shape
    begin = 0
    for name, count in rows.items():
        new = f"{fused.rpartition('.')[0]}.{name}.weight"
        draft.add(new, f"{fused}.weight", (count, columns), _rows(read, begin, count))
        begin += count
    draft.drop(f"{fused}.weight")


def _rows(read: Callable[[], Tensor], begin: int, count: int) -> Callable[[], Tensor]:
    return lambda: read()[begin : begin + count]


def rename_experts(draft: Draft, config: Any, scheme: Scheme) -> None:
    """Mixtral's names of its experts become Qwen 3's."""
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for name in list(draft.parts):
        place, _, rest = name.partition(".block_sparse_moe.")
        if rest:
            draft.rename(name, f"{place}.mlp." + ".".join(names.get(word, word) for word in rest.split(".")))


def fill_output_bias(draft: Draft, config: Any, scheme: Scheme) -> None:
    """Qwen 2 has biases on q, k and v alone; where one switch stands for all four, the fourth is zero."""
    for layer in range(config.num_hidden_layers if biased(config) else 0):
        name = f"{attention(layer)}o_proj.bias"
        if name not in draft:
            draft.fill(name, f"{attention(layer)}q_proj.bias", (config.hidden_size,), 0.0)


def scale_queries(draft: Draft, config: Any, scheme: Scheme) -> None:
    """Without norms, a scale of the logits goes into the projection of the queries."""
    for layer in range(config.num_hidden_layers if scheme.scale is not None else 0):
        for name in (f"{attention(layer)}q_proj.{kind}" for kind in KINDS):
            if name in draft:
                why = f"scale={scheme.scale:g} would be folded into the projection of the queries"
                draft.scale(name, scale_factor(config, scheme), why)


def align_eps(draft: Draft, config: Any, scheme: Scheme) -> None:
    """Let the model's own eps stand in the norms: with q and k times a, eps·a² under the root gives what eps gave."""
    eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_eps
    if math.isclose(eps, scheme.eps):
        return
    why = (
        f"the scheme's eps={scheme.eps:g} is not the model's {eps:g}, which its counterpart has in all norms, so that "
        f"the projections of q and k would be scaled by {(eps / scheme.eps) ** 0.5:.4g} (no such trouble with a scheme "
        f"made with eps={eps:g}: Scheme(..., eps={eps:g}))"
    )
    for layer in range(config.num_hidden_layers):
        for projection in ("q_proj", "k_proj"):
            for name in (f"{attention(layer)}{projection}.{kind}" for kind in KINDS):
                if name in draft:
                    draft.scale(name, (eps / scheme.eps) ** 0.5, why)


def share_gains(draft: Draft, config: Any, scheme: Scheme) -> None:
    """Gains `[D]` for q and k; whatever multiplies the logits otherwise than in the target goes into the queries'."""
    width = head_dim(config)
    factor = scale_factor(config, scheme)
    for norm in (scheme.q, scheme.k):
        factor *= (
            width**-0.5 if norm is not None and norms.NORMS[norm].summed else 1.0
        )  # the length of the normed vector; rms has √D
    why = f"with scale={scheme.scale} and norms {scheme.q}, {scheme.k} the queries' gains would be scaled"
    for layer in range(config.num_hidden_layers):
        for norm in ("q_norm", "k_norm"):
            name = f"{attention(layer)}{norm}.weight"
            if name not in draft:
                draft.fill(name, f"{attention(layer)}q_proj.weight", (width,), 1.0)
            elif draft.parts[name].shape != (width,):
                draft.change(name, lambda gain: gain.expand(width), (width,))
        for name in (f"{attention(layer)}q_norm.{kind}" for kind in KINDS):
            if name in draft:
                draft.scale(name, factor, why)


def centre_gains(draft: Draft, config: Any, scheme: Scheme) -> None:
    """Gemma holds the gain of its norms as weight = gain − 1, and has its own name for the one before the MLP."""
    names = [f"model.layers.{i}.{norm}.weight" for i in range(config.num_hidden_layers) for norm in NORMS]
    for name in [*names, "model.norm.weight"]:
        draft.require_wide(name, "the gains of the norms are held as their difference from 1")
        draft.change(name, lambda gain: gain - 1)
        draft.rename(name, name.replace("post_attention_layernorm", "pre_feedforward_layernorm"))


def shrink_embedding(draft: Draft, config: Any, scheme: Scheme) -> None:
    """Gemma multiplies embeddings by √hidden; where the head is tied to them it must become a tensor of its own."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if config.tie_word_embeddings:
        draft.add(head, embedding, draft.parts[embedding].shape, draft.reader(embedding))
    draft.scale(embedding, config.hidden_size**-0.5, "the embeddings would be divided by √hidden_size")
