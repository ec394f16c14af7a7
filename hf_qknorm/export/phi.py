"""Transforms from GPT-NeoX with normed queries and keys to Phi: separate projections, one norm a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_qknorm.export.tensor_plan import TensorPlan
from hf_qknorm.export.transforms import KINDS, attention, head_dim

TOP = {
    "gpt_neox.embed_in.weight": "model.embed_tokens.weight",
    "gpt_neox.final_layer_norm.weight": "model.final_layernorm.weight",
    "gpt_neox.final_layer_norm.bias": "model.final_layernorm.bias",
    "embed_out.weight": "lm_head.weight",
}
IN_LAYER = {
    "attention.dense": "self_attn.dense",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp.dense_4h_to_h": "mlp.fc2",
}


def rename_to_phi(plan: TensorPlan, config: Any) -> None:
    """Rename the tensors, split the fused projection, and fold a layer's two norms into the projections after them.

    GPT-NeoX has a norm each for attention and MLP, of the same input. Their gains and biases are folded, and the rest
    of both is Phi's single norm.
    """
    for old, new in TOP.items():
        plan.rename(old, new)
    plan.fill("lm_head.bias", "model.embed_tokens.weight", (config.vocab_size,), 0.0)
    heads, width, hidden = config.num_attention_heads, head_dim(config), config.hidden_size
    for layer in range(config.num_hidden_layers):
        old, new = f"gpt_neox.layers.{layer}.", f"model.layers.{layer}."
        for module, name in IN_LAYER.items():
            for kind in (*KINDS, "knee"):
                plan.rename(f"{old}{module}.{kind}", f"{new}{name}.{kind}")
        qkv, norm = f"{old}attention.query_key_value", f"{old}input_layernorm"
        for index, letter in enumerate("qkv"):
            rows = _deinterleave(heads, width, index)
            _fold(plan, qkv, norm, f"{new}self_attn.{letter}_proj", rows, (heads * width, hidden))
        up, norm_up = f"{old}mlp.dense_h_to_4h", f"{old}post_attention_layernorm"
        _fold(plan, up, norm_up, f"{new}mlp.fc1", lambda x: x, (config.intermediate_size, hidden))
        for kind, value in (("weight", 1.0), ("bias", 0.0)):
            plan.fill(f"{new}input_layernorm.{kind}", f"{norm}.{kind}", (hidden,), value)
            plan.drop(*(f"{name}.{kind}" for name in (qkv, up, norm, norm_up)))
        plan.fill_missing(f"{new}self_attn.dense.bias", f"{new}self_attn.dense.weight", (hidden,), 0.0)


def rename_norms(plan: TensorPlan, config: Any) -> None:
    """Rename the norms on q and k as Phi's, and add their biases."""
    for norm in (f"{attention(layer)}{letter}_" for layer in range(config.num_hidden_layers) for letter in "qk"):
        plan.fill_missing(f"{norm}norm.bias", f"{norm}norm.weight", (head_dim(config),), 0.0)
        for kind in KINDS:
            plan.rename(f"{norm}norm.{kind}", f"{norm}layernorm.{kind}")


def _deinterleave(heads: int, width: int, index: int) -> Callable[[Tensor], Tensor]:
    """Return a function that takes q, k or v (`index` 0, 1, 2) out of rows that are interleaved by head."""
    return lambda x: x.view(heads, 3, width, *x.shape[1:])[:, index].flatten(0, 1)


def _fold(
    plan: TensorPlan, old: str, norm: str, new: str, rows: Callable[[Tensor], Tensor], shape: tuple[int, int]
) -> None:
    """Add rows of W(n·gain + shift) + b as W·gain·n + (W·shift + b); a missing b is zero."""
    plan.require_wide(f"{old}.weight", "the two norms of a layer would become one, with gains and biases folded")
    weight, gain, shift = (plan.reader(name) for name in (f"{old}.weight", f"{norm}.weight", f"{norm}.bias"))
    bias = plan.reader(f"{old}.bias") if f"{old}.bias" in plan else (lambda: torch.zeros(()))

    def folded_bias() -> Tensor:
        own = bias().double()
        return rows(weight().double()) @ shift().double() + (rows(own) if own.dim() else own)

    plan.add(f"{new}.weight", f"{old}.weight", shape, lambda: rows(weight().double()) * gain().double())
    plan.add(f"{new}.bias", f"{old}.weight", shape[:1], folded_bias)
