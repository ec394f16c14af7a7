"""The models that can be patched: one line each in `FAMILIES`, one small file a style."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from hf_qknorm.families import gpt2
from hf_qknorm.families.fused import NEOX, PHI3
from hf_qknorm.families.separate import SEPARATE
from hf_qknorm.families.style import Style
from hf_qknorm.scheme import Scheme


@dataclass(frozen=True)
class Family:
    """A model type of transformers: the attention class that is patched, its style, and what it already has.

    `norm` is what "auto" means for it; `pre_norm` names the norm in front of attention on the decoder layer, whose
    gain may be held as 1 + weight.
    """

    attention: str
    style: Style
    norm: str = "rms"
    pre_norm: str = "input_layernorm"
    gain_plus_one: bool = False
    own_norms: bool = False
    own_cap: bool = False
    unsupported: Callable[[Any], str | None] | None = None


FAMILIES: Final[dict[str, Family]] = {
    "gemma2": Family("Gemma2Attention", SEPARATE, gain_plus_one=True, own_cap=True),
    "gpt2": Family("GPT2Attention", gpt2.GPT2, "layer", "ln_1", unsupported=gpt2.unsupported),
    "gpt_neox": Family("GPTNeoXAttention", NEOX, "layer"),
    "llama": Family("LlamaAttention", SEPARATE),
    "mistral": Family("MistralAttention", SEPARATE),
    "mixtral": Family("MixtralAttention", SEPARATE),
    "phi3": Family("Phi3Attention", PHI3),
    "qwen2": Family("Qwen2Attention", SEPARATE),
    "qwen3": Family("Qwen3Attention", SEPARATE, own_norms=True),
}


def family_of(config: Any) -> Family:
    """The family of a model's config. Raises ValueError, with the reason, if there is none or it does not serve it."""
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"model_type {config.model_type!r} is not supported. Supported model types: {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[config.model_type]
    reason = family.unsupported(config) if family.unsupported else None
    if reason:
        raise ValueError(f"this {config.model_type} is not supported: {reason}")
    return family


def check_scheme(model_type: str, scheme: Scheme) -> None:
    """Raise ValueError if `scheme` can't be put on a model of this type: norms are never stacked on norms."""
    if FAMILIES[model_type].own_norms and scheme.norms:
        raise ValueError(
            f"{model_type} already normalises its queries and keys (q_norm, k_norm), and norms are not stacked: got "
            f'the scheme {scheme}. Only a cap can be added, as with scheme="soft_cap" or Scheme(softcap=50.0)'
        )
