"""The models of transformers that compute the same as a patched one: Qwen 3, for a model of Llama's shape.

Qwen 3 and its mixture of experts have an RMSNorm over head_dim on q and k, before RoPE, with one gain a layer and the
eps of all norms. A knee of sharpness 1 is a larger ε in each norm, which moves to the projections: with x times
√(eps/ε), the model's one eps has its effect.

No model has both norms and a cap: Gemma 3's config can state a cap, but its attention does not apply it. OLMo 2 and 3
and OLMoE norm q and k over all heads together. HunYuan's norms come after RoPE; StableLM, Phi and Cohere have
LayerNorm where Llama has RMSNorm.
"""

from __future__ import annotations

from typing import Any, Final

COUNTERPARTS: Final = {"llama": "qwen3", "mistral": "qwen3", "mixtral": "qwen3_moe", "qwen2": "qwen3"}
RMS: Final = ("rms", "l2", "lp")  # l2, and lp with p = 2, are rms/√D


def counterpart(config: Any) -> str:
    """The model type of transformers that computes the same as the patched model of this config.

    Raises ValueError, naming what would be lost, if there is none.
    """
    if lost := _lost(config):
        raise ValueError(
            f"{lost}. An export is a Qwen 3, for RMS norms without a cap on {', '.join(COUNTERPARTS)}; or the model "
            "that was patched, if training has removed the norms, or data (--data TEXT) measures what their removal "
            "costs"
        )
    return COUNTERPARTS[config.base_model_type]


def settings(config: Any) -> dict[str, Any]:
    """The settings of the counterpart that differ from those of the same name in the patched model's config."""
    base, layers = config.base_model_type, config.num_hidden_layers
    window = None if base == "llama" else config.sliding_window  # a Llama ignores the setting
    own: dict[str, Any] = {
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "attention_bias": base == "qwen2" or getattr(config, "attention_bias", False),
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }
    if base == "mixtral":
        experts = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        return own | experts | {"moe_intermediate_size": config.intermediate_size}
    kind = "full_attention" if window is None else "sliding_attention"
    types = list(config.layer_types) if base == "qwen2" else [kind] * layers
    return own | {"layer_types": types, "max_window_layers": types.count("full_attention")}


def _lost(config: Any) -> str | None:
    """What of a patched model would be lost in transformers' own, as the beginning of a sentence, or None."""
    scheme, base = config.scheme, config.base_model_type
    named = f"norms (q={scheme.q}, k={scheme.k})"
    if config.attn_logit_softcapping is not None:
        return f"{f'{named} or ' if scheme.norms else ''}the cap of {config.attn_logit_softcapping:g} would be lost"
    if not scheme.norms:
        return f"scale={scheme.scale} would be lost"
    if scheme.v is not None:
        return "the norm of the values would be lost: convert with a scheme on q and k alone, such as qk_norm"
    if None in (scheme.q, scheme.k):
        return f"{named} would be lost: convert with a scheme on both, such as qk_norm"
    if base not in COUNTERPARTS or not {*scheme.norms} <= {*RMS}:
        return f"{named} would be lost: transformers has no {base} with them"
    if "lp" in scheme.norms and scheme.p != 2:
        return f"norms of order p={scheme.p:g} would be lost: convert with henry or qk_norm, whose order is 2"
    if scheme.gain == "per_head":
        return 'gains per head would be lost: convert with gain="shared"'
    if any(scheme.has_bias(norm) for norm in scheme.norms):
        return "the biases of the norms on q and k would be lost: convert with bias=False"
    if getattr(config, "mlp_bias", False):
        return "the biases of the MLP would be lost (mlp_bias=True)"
    return None
