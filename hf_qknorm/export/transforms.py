"""Transforms of a plan, from the tensors of a patched Llama, Mistral, Mixtral, Phi-3 or Qwen 2 to a target's."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import torch

from hf_qknorm.export.tensor_plan import TensorPlan
from hf_qknorm.ops import norms

KINDS = ("weight", "bias")
NORMED = ("qwen3",)  # with a norm of its own behind the projection of the queries
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")  # of a layer, before attention and MLP


def head_dim(config: Any) -> int:
    """Return the size of a head; without the setting, or if the model ignores it, it follows from `hidden_size`."""
    stated = None if config.base_model_type == "gpt_neox" else getattr(config, "head_dim", None)
    return stated or int(config.hidden_size // config.num_attention_heads)


def biased(config: Any) -> bool:
    """Return whether the projections of q, k and v have biases."""
    return config.base_model_type == "qwen2" or getattr(config, "attention_bias", False)


def attention(layer: int) -> str:
    """Return the prefix of the names in a layer's attention."""
    return f"model.layers.{layer}.self_attn."


def split_fused(plan: TensorPlan, config: Any) -> None:
    """Split Phi-3's qkv_proj and gate_up_proj into separate projections."""
    if config.base_model_type != "phi3":
        return
    queries, keys = (heads * head_dim(config) for heads in (config.num_attention_heads, config.num_key_value_heads))
    mlp = config.intermediate_size
    for layer in range(config.num_hidden_layers):
        _split(plan, f"{attention(layer)}qkv_proj", {"q_proj": queries, "k_proj": keys, "v_proj": keys})
        _split(plan, f"model.layers.{layer}.mlp.gate_up_proj", {"gate_proj": mlp, "up_proj": mlp})


def _split(plan: TensorPlan, fused: str, rows: dict[str, int]) -> None:
    read, (_, columns) = plan.reader(f"{fused}.weight"), plan.planned[f"{fused}.weight"].shape
    for index, (name, count) in enumerate(rows.items()):
        part = partial(lambda i: torch.split(read(), [*rows.values()])[i], index)
        plan.add(f"{fused.rpartition('.')[0]}.{name}.weight", f"{fused}.weight", (count, columns), part)
    plan.drop(f"{fused}.weight")


def fill_output_bias(plan: TensorPlan, config: Any) -> None:
    """Add a zero bias of the output projection: Qwen 2 has biases on q, k and v alone, the target on all four."""
    for layer in range(config.num_hidden_layers if biased(config) else 0):
        prefix = attention(layer)
        plan.fill_missing(f"{prefix}o_proj.bias", f"{prefix}q_proj.bias", (config.hidden_size,), 0.0)


def _scale(plan: TensorPlan, module: str, factor: float, reason: str) -> None:
    """Scale weight and bias of a module in every attention layer, also of a model without a head."""
    tensor = re.compile(rf"(.+\.)?layers\.\d+\.self_attn\.{module}\.({'|'.join(KINDS)})")
    for name in filter(tensor.fullmatch, list(plan.planned)):
        plan.scale(name, factor, reason)


def _scale_factor(config: Any) -> float:
    """Return the scheme's scale of q·k relative to the unpatched model's."""
    if config.scheme.scale is None:
        return 1.0
    return float(config.scheme.scale * getattr(config, "query_pre_attn_scalar", head_dim(config)) ** 0.5)


def scale_queries(plan: TensorPlan, config: Any) -> None:
    """Fold a scale of the logits into the projection of the queries, or the gain of the model's own norm behind it."""
    if config.scheme.scale is not None:
        part = "q_norm" if config.base_model_type in NORMED else "q_proj"
        _scale(plan, part, _scale_factor(config), f"scale={config.scheme.scale:g} would be folded into {part}")


def own_eps(config: Any) -> float:
    """Return the eps of the model's own norms, which its counterpart has in all norms."""
    return float(getattr(config, "rms_norm_eps", None) or config.layer_norm_eps)


def align_eps(plan: TensorPlan, config: Any) -> None:
    """Replace the ε of each norm by the model's eps: with x scaled by s, ε·s² under the root has the same effect.

    The norm in front of attention takes a power of two of the scale, unless an MLP reads it too, as Phi's: K-quants
    have too few exponents for projections as small as s makes them. It takes 5/8 of the exponent: with half, a small
    Llama's Q6_K is 1.3 times as far off as its original's, and more would leave little of fp16's range to the norm.
    """
    own, scheme = own_eps(config), config.scheme
    for layer in range(config.num_hidden_layers):
        factors = []
        for letter in "qk":
            shape = norm_shape(plan, layer, letter)
            if shape.epsilon and shape.sharpness > 1:
                raise ValueError(
                    f"the sharpness of {shape.sharpness:g} would be lost: its norms have RMSNorm's own form. Convert "
                    "with a fixed knee (--knee 16), which leaves the sharpness at 1; or take the norms off (hf-qknorm "
                    "export --data measures the cost), or lower the knee to 0 in training (KneeSchedule)"
                )
            eps = scheme.eps * 2.0**shape.epsilon
            factors.append(factor := (own / eps) ** 0.5)
            reason = (
                f"the norm's eps={eps:g} is not the model's {own:g}, which its counterpart has in all norms, so that "
                f"the projection would be scaled by {factor:.4g}"
            )
            hint = f" (a scheme with Scheme(..., eps={own:g}) avoids that)"
            hint = " (calibrate with exportable=True, --exportable, to avoid that)" if shape.epsilon else hint
            for name in (f"{attention(layer)}{letter}_proj.{kind}" for kind in KINDS):
                if name in plan:
                    plan.scale(name, factor, reason + hint)
        if config.base_model_type != "gpt_neox":
            share = 2.0 ** round(math.log2(factors[0] * factors[1]) / 2 * 5 / 8)
            plan.scale(f"model.layers.{layer}.{LAYER_NORMS[0]}.weight", share, "")
            for letter in "qkv":
                plan.scale(f"{attention(layer)}{letter}_proj.weight", 1 / share, "")


def share_gains(plan: TensorPlan, config: Any) -> None:
    """Expand the gains of q and k to one entry a channel, and fold every factor of the logits into the queries'."""
    width, scheme = head_dim(config), config.scheme
    kinds = {letter: norms.NORMS[norm] for letter, norm in (("q", scheme.q), ("k", scheme.k)) if norm is not None}
    for layer in range(config.num_hidden_layers):
        factor = _scale_factor(config)
        for letter, kind in kinds.items():
            name = f"{attention(layer)}{letter}_norm.weight"
            plan.fill_missing(name, f"{attention(layer)}q_proj.weight", (width,), 1.0)
            if plan.planned[name].shape != (width,):
                plan.change(name, partial(torch.Tensor.expand, size=(width,)), (width,))
            shape = norm_shape(plan, layer, letter)
            length = shape.length(scheme.eps, 2.0, width if kind.summed else 1)
            if shape.power:
                plan.scale(name, length, f"the length that the norm keeps would be multiplied into {name}")
            else:
                factor *= length  # of both sides: their product may be a power of two
            plan.drop(f"{attention(layer)}{letter}_norm.knee")
        reason = f"with scale={scheme.scale} and norms {scheme.q}, {scheme.k} the queries' gains would be scaled"
        for name in (f"{attention(layer)}q_norm.{kind}" for kind in KINDS):
            if name in plan:
                plan.scale(name, factor, reason)


def norm_shape(plan: TensorPlan, layer: int, letter: str) -> norms.Shape:
    """The shape of the norm of queries or keys ("q", "k") in a layer."""
    return norms.Shape.of(plan.reader(f"{attention(layer)}{letter}_norm.knee")())


def centre_gains(plan: TensorPlan, config: Any) -> None:
    """Store the gains of norms as Gemma does, as gain − 1, and rename the norm before the MLP."""
    names = (f"model.layers.{i}.{norm}.weight" for i in range(config.num_hidden_layers) for norm in LAYER_NORMS)
    for name in (*names, "model.norm.weight"):
        plan.require_wide(name, "the gains of the norms are stored as their difference from 1")
        plan.change(name, lambda gain: gain - 1)
        plan.rename(name, name.replace("post_attention_layernorm", "pre_feedforward_layernorm"))


def shrink_embedding(plan: TensorPlan, config: Any) -> None:
    """Divide the embeddings by √hidden_size, by which Gemma multiplies them; a tied head becomes a separate tensor."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if config.tie_word_embeddings:
        plan.add(head, embedding, plan.planned[embedding].shape, plan.reader(embedding))
    plan.scale(embedding, config.hidden_size**-0.5, "the embeddings would be divided by √hidden_size")
