"""Cross-attention: the queries of a decoder, and keys and values from the states of an encoder."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_qknorm.families.style import add_to_cache


def attend_across(
    layer: Any, hidden_states: Tensor, states: Tensor, mask: Tensor | None, cache: Any, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Attend from hidden_states `[B, T, C]` to the encoder's `[B, S, C]`: `[B, T, H, D]`, and the weights or None.

    The norms are self-attention's own, and come before the cache: a cache of an encoder-decoder stores the normed
    keys at its first call, and later calls read them.
    """
    style, slot = layer.family.style, layer.family.style.slot(layer, **options)
    filled = getattr(cache, "is_updated", None)  # by layer, in the cache of an encoder-decoder
    stored = getattr(cache, "cross_attention_cache", cache)
    again = bool(filled is not None and filled.get(slot))
    q, k, v = style.project_across(layer, hidden_states, None if again else states)
    q = layer.normed("q_norm", q.transpose(1, 2))
    if again:
        k, v = stored.layers[slot].keys, stored.layers[slot].values
    else:
        k, v = layer.normed("k_norm", k.transpose(1, 2)), layer.normed("v_norm", v.transpose(1, 2))
        if stored is not None:
            k, v = add_to_cache(stored, k.to(v.dtype), v, slot, options)
        if filled is not None:
            filled[slot] = True
    options = options | {"is_causal": False}
    if style.prescaled:
        q, options = q * layer.logit_scale, options | {"scaling": 1.0}
    q, k = q.to(v.dtype), k.to(v.dtype)
    if style.bias is not None:
        options["position_bias"] = style.bias(layer, q, k, v=v, mask=mask, **options)
    layer.show(q, k, v, mask, options)
    found: tuple[Tensor, Tensor | None] = layer.attention_function()(layer, q, k, v, mask, **options)
    return found
