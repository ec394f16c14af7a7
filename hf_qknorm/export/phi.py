"""From GPT-NeoX with normed queries and keys to Phi: projections apart, and one norm before attention and MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_qknorm.export.tensor_plan import Draft
from hf_qknorm.export.transforms import KINDS, attention, head_dim
from hf_qknorm.scheme import Scheme

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


def name_as_phi(draft: Draft, config: Any, scheme: Scheme) -> None:
    """Rename, take the fused projection apart, and fold a layer's two norms into what stands behind each.

    Attention and MLP have a norm of their own each, of the same input: their gains and biases go into the projections
    behind them, and what is left of both is the one norm that Phi has.
    """
    for old, new in TOP.items():
        draft.rename(old, new)
    draft.fill("lm_head.bias", "model.embed_tokens.weight", (config.vocab_size,), 0.0)
    heads, width, hidden = config.num_attention_heads, head_dim(config), config.hidden_size
    for layer in range(config.num_hidden_layers):
        old, new = f"gpt_neox.layers.{layer}.", f"model.layers.{layer}."
        for part, name in IN_LAYER.items():
            for kind in KINDS:
                draft.rename(f"{old}{part}.{kind}", f"{new}{name}.{kind}")
        qkv, norm = f"{old}attention.query_key_value", f"{old}input_layernorm"
        for index, letter in enumerate("qkv"):
            rows = _interleaved(heads, width, index)
            _fold(draft, qkv, norm, f"{new}self_attn.{letter}_proj", rows, (heads * width, hidden))
        up, norm_up = f"{old}mlp.dense_h_to_4h", f"{old}post_attention_layernorm"
        _fold(draft, up, norm_up, f"{new}mlp.fc1", lambda x: x, (config.intermediate_size, hidden))
        for kind, value in (("weight", 1.0), ("bias", 0.0)):
            draft.fill(f"{new}input_layernorm.{kind}", f"{norm}.{kind}", (hidden,), value)
            draft.drop(*(f"{name}.{kind}" for name in (qkv, up, norm, norm_up)))
        _fill_bias(draft, f"{new}self_attn.dense", hidden)


def name_norms(draft: Draft, config: Any, scheme: Scheme) -> None:
    """Phi's names of the norms on q and k, which have biases."""
    for layer in range(config.num_hidden_layers):
        for letter in "qk":
            norm = f"{attention(layer)}{letter}_norm"
            _fill_bias(draft, norm, head_dim(config))
            for kind in KINDS:
                draft.rename(f"{norm}.{kind}", f"{attention(layer)}{letter}_layernorm.{kind}")


def _interleaved(heads: int, width: int, index: int) -> Callable[[Tensor], Tensor]:
    """What takes q, k or v (`index` 0, 1, 2) out of rows that are interleaved by head."""
    return lambda x: x.view(heads, 3, width, *x.shape[1:])[:, index].flatten(0, 1)


def _fold(
    draft: Draft,
    old: str,
    norm: str,
    new: str,
    rows: Callable[[Tensor], Tensor],
    shape: tuple[int, int],
) -> None:
    """W(n·gain + shift) + b as W·gain·n + (W·shift + b), for the rows of a projection; a missing b is zero."""
    draft.require_wide(f"{old}.weight", "the two norms of a layer would become one, their gains and biases folded")
    weight, gain, shift = (draft.reader(name) for name in (f"{old}.weight", f"{norm}.weight", f"{norm}.bias"))
    bias = draft.reader(f"{old}.bias") if f"{old}.bias" in draft else (lambda: torch.zeros(()))

    def folded_bias() -> Tensor:
        own = bias().double()
        return rows(weight().double()) @ shift().double() + (rows(own) if own.dim() else own)

    draft.add(f"{new}.weight", f"{old}.weight", shape, lambda: rows(weight().double()) * gain().double())
    draft.add(f"{new}.bias", f"{old}.weight", shape[:1], folded_bias)


def _fill_bias(draft: Draft, module: str, size: int) -> None:
    if f"{module}.bias" not in draft:
        draft.fill(f"{module}.bias", f"{module}.weight", (size,), 0.0)
