"""The models of transformers that compute the same as a patched one. A new target is an entry of `TARGETS`.

What each computes, by its modelling file:

qwen3, qwen3_moe  RMSNorm over head_dim on q and k, before RoPE, one gain a layer, with the eps of all norms
phi               LayerNorm there, with a bias; attention and MLP in parallel, after one norm
vaultgemma        a cap on the logits, no norms on q and k; gains as weight + 1, embeddings times √hidden_size

A knee of sharpness 1 is a larger ε in each norm, which moves to the projections: with x times √(eps/ε), the model's one
eps has its effect. No model has both norms and a cap: Gemma 3's config can state a cap, but its attention does not
apply it. OLMo 2 and 3 and OLMoE norm q and k over all heads together. HunYuan's norms come after RoPE; StableLM and
Cohere have LayerNorm where Llama has RMSNorm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from hf_qknorm.export import phi, transforms
from hf_qknorm.export.tensor_plan import TensorPlan
from hf_qknorm.families import CAPPED, FAMILIES
from hf_qknorm.scheme import Scheme

SEPARATE: Final = ("gemma2", "llama", "mistral", "mixtral", "qwen2")  # with a projection for q alone, and no norm of it
RMS: Final = ("rms", "l2", "lp")  # l2, and lp with p = 2, are rms/√D
Settings = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A model type of transformers, the norms of its queries and keys, and whether it caps the logits.

    `settings` returns the settings that differ from the source config's; `transforms` change the tensor plan, in order;
    `obstacle` returns what of a config would be lost, or None.
    """

    model_type: str
    norms: tuple[str, ...]
    cap: bool
    settings: Callable[[Any], Settings]
    transforms: tuple[Callable[[TensorPlan, Any], None], ...]
    obstacle: Callable[[Any], str | None] = lambda config: None


def _window(config: Any) -> int | None:
    """Return the sliding window; None for a Llama, which ignores the setting."""
    return None if config.base_model_type == "llama" else config.sliding_window


def _layer_types(config: Any) -> list[str]:
    if config.base_model_type == "qwen2":
        return list(config.layer_types)
    return ["full_attention" if _window(config) is None else "sliding_attention"] * config.num_hidden_layers


def _qwen3_settings(config: Any) -> Settings:
    return {
        "head_dim": transforms.head_dim(config),
        "attention_bias": transforms.biased(config),
        "use_sliding_window": _window(config) is not None,
        "sliding_window": _window(config),
        "max_window_layers": _layer_types(config).count("full_attention"),
        "layer_types": _layer_types(config),
    }


def _qwen3_moe_settings(config: Any) -> Settings:
    return {
        "head_dim": transforms.head_dim(config),
        "attention_bias": False,
        "use_sliding_window": _window(config) is not None,
        "sliding_window": _window(config),
        "moe_intermediate_size": config.intermediate_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _vaultgemma_settings(config: Any) -> Settings:
    window = _window(config)
    return {
        "head_dim": transforms.head_dim(config),
        "attention_bias": transforms.biased(config),
        "query_pre_attn_scalar": transforms.head_dim(config),
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": None,
        "hidden_activation": config.hidden_act,
        "sliding_window": config.max_position_embeddings if window is None else window,  # it always makes that mask
        "layer_types": _layer_types(config),
        "tie_word_embeddings": False,
    }


def _phi_settings(config: Any) -> Settings:
    return {
        "num_key_value_heads": config.num_attention_heads,
        "qk_layernorm": True,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
    }


def _llama_obstacle(config: Any) -> str | None:
    if getattr(config, "mlp_bias", False):
        return "the biases of the MLP would be lost (mlp_bias=True)"
    rope = config.rope_parameters
    if config.base_model_type == "phi3" and (rope["rope_type"] != "default" or rope["partial_rotary_factor"] != 1):
        return (
            f"rope_type={rope['rope_type']!r}, partial_rotary_factor={rope['partial_rotary_factor']:g} would be lost: "
            "only Phi-3 rotates a part of each head, and starts its cache anew where LongRoPE switches factors"
        )
    return None


def _neox_obstacle(config: Any) -> str | None:
    parallel = config.use_parallel_residual
    return None if parallel else "attention and MLP are in parallel there (use_parallel_residual=False)"


_NORMS = (transforms.align_eps, transforms.share_gains)
_LLAMA = (transforms.split_fused, transforms.fill_output_bias)
QWEN3 = Target("qwen3", RMS, False, _qwen3_settings, (*_LLAMA, *_NORMS), _llama_obstacle)
QWEN3_MOE = Target("qwen3_moe", RMS, False, _qwen3_moe_settings, _NORMS, _llama_obstacle)
PHI = Target("phi", ("layer",), False, _phi_settings, (phi.rename_to_phi, *_NORMS, phi.rename_norms), _neox_obstacle)
VAULTGEMMA = Target(
    "vaultgemma", (), True, _vaultgemma_settings,
    (*_LLAMA, transforms.scale_queries, transforms.centre_gains, transforms.shrink_embedding), _llama_obstacle,
)  # fmt: skip

# By the patched model type. A scheme without norms goes back to that type itself, if it has no cap or a cap of its own.
TARGETS: Final[dict[str, tuple[Target, ...]]] = {
    "gpt_neox": (PHI,),
    "llama": (QWEN3, VAULTGEMMA),
    "mistral": (QWEN3, VAULTGEMMA),
    "mixtral": (QWEN3_MOE,),
    "phi3": (QWEN3, VAULTGEMMA),
    "qwen2": (QWEN3, VAULTGEMMA),
}


def find_target(config: Any) -> Target:
    """Return the target of a patched model's config. Raises ValueError, naming the lost parts, without one."""
    base, scheme = config.base_model_type, config.scheme
    norms, capped = set(scheme.norms), scheme.softcap is not None
    own_cap = FAMILIES.get(base, CAPPED).own_cap
    if not norms and (not capped or own_cap):  # the type stays, and a fused projection is not split
        if scheme.scale is not None and base not in (*SEPARATE, *transforms.NORMED):
            raise ValueError(
                f"scale={scheme.scale:g} would be lost: {base} has no projection of the queries alone to fold it into"
            )
        return Target(base, (), own_cap, lambda config: {}, (transforms.scale_queries,))
    for target in TARGETS.get(base, ()):
        alike = (capped, bool(norms)) == (target.cap, bool(target.norms))
        if alike and norms <= set(target.norms):
            if lost := target.obstacle(config) or _lost(target, scheme):
                raise ValueError(f"{target.model_type} would be its counterpart, but {lost}")
            return target
    possible = ["any model with the scheme none, or whose norms training has removed", "gemma2 with a cap"]
    for model_type, targets in TARGETS.items():
        possible += [f"{model_type} with {_named(target)}" for target in targets]
    parts = [f"norms (q={scheme.q}, k={scheme.k})"] if norms else []
    if config.attn_logit_softcapping is not None:
        parts.append(f"the cap of {config.attn_logit_softcapping:g}")
    raise ValueError(
        f"{' or '.join(parts)} would be lost: transformers has no model that is a {base} with "
        f"{'norms and a cap' if len(parts) > 1 else parts[0]}. What can be exported: {', '.join(possible)}; never "
        "norms and a cap"
    )


def _named(target: Target) -> str:
    """Return the norms or the cap of a target in words."""
    return "a cap" if target.cap else "/".join(target.norms)


def _lost(target: Target, scheme: Scheme) -> str | None:
    """Return what of a scheme would be lost in a target with the same kinds of norms and cap."""
    if scheme.v is not None:
        return "the norm of the values would be lost: convert with a scheme on q and k alone, such as qk_norm"
    if scheme.norms and None in (scheme.q, scheme.k):
        return "it norms both queries and keys, not one of them: convert with a scheme on both, such as qk_norm"
    if "lp" in scheme.norms and scheme.p != 2:
        return f"its norms are of order 2, not p={scheme.p:g}: convert with henry or qk_norm"
    if scheme.gain == "per_head" and scheme.norms:
        return 'its gains are shared by the heads of a layer, gains per head would be lost: convert with gain="shared"'
    if target.norms == RMS and any(scheme.has_bias(norm) for norm in scheme.norms):
        return "the biases of the norms on q and k would be lost there: convert with bias=False"
    return None
