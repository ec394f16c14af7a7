"""`Family`: what is to be known of a model type of transformers to patch it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_qknorm.families.style import Style
from hf_qknorm.families.windows import nowhere
from hf_qknorm.scheme import Scheme


@dataclass(frozen=True)
class Family:
    """A model type of transformers: the attention class that is patched, its style, and what it already has.

    `norm` is what "auto" means for it; `pre_norm` names the norm in front of attention on the decoder layer, ""
    where there is none or others read it too; its gain may be held as 1 + weight. `rope` tells kernels what turns, and
    how the model's cos and sin hold the angles (`model/attention.py`); None where only the model's own code will do.

    `own_norms`: the model norms its queries and keys; a string is the switch in its config that says so. `own_cap`: it
    caps its logits, by `attn_logit_softcapping`. `latent`: keys and values are projected from a latent that is cached.
    `causal`: no token sees those behind it; a string is the switch in its config that says so.
    `slides` says of a layer whether it attends through the config's sliding window (`hf_qknorm.families.windows`).
    `unsupported` says, of a config, why it can't be patched, or None; cross-attention is refused for every family.
    """

    attention: str
    style: Style
    norm: str = "rms"
    pre_norm: str = "input_layernorm"
    rope: str | None = "halves"
    gain_plus_one: bool = False
    own_norms: bool | str = False
    own_cap: bool = False
    latent: bool = False
    causal: bool | str = True
    slides: Callable[[Any], bool] = nowhere
    unsupported: Callable[[Any], str | None] | None = None

    def has_norms(self, config: Any) -> bool:
        """Whether a model with this config norms its queries and keys by itself."""
        return bool(getattr(config, self.own_norms)) if isinstance(self.own_norms, str) else self.own_norms

    def is_causal(self, config: Any) -> bool:
        """Whether in a model with this config no token sees those behind it."""
        return bool(getattr(config, self.causal)) if isinstance(self.causal, str) else self.causal

    @property
    def has_window(self) -> bool:
        """Whether any of its models attends through a sliding window."""
        return self.slides is not nowhere

    def unsupported_by(self, config: Any) -> str | None:
        """Why no scheme can be put on a model with this config, or None."""
        if getattr(config, "add_cross_attention", False):
            return "is not supported with add_cross_attention=True: its layers attend to an encoder too"
        reason = self.unsupported(config) if self.unsupported else None
        return reason and f"is not supported with {reason}"

    def refusal(self, config: Any, scheme: Scheme) -> str | None:
        """Why `scheme` can't be put on a model with this config, or None."""
        if reason := self.unsupported_by(config):
            return reason
        if scheme.norms and self.has_norms(config):
            return (
                "already normalises its queries and keys, and norms are not stacked: got the scheme "
                f'{scheme}. Only a cap can be added, as with scheme="soft_cap" or Scheme(softcap=50.0)'
            )
        if scheme.norms and self.latent:
            return (
                "keeps a latent in its cache, which keys and values are projected from; a norm behind that projection "
                f"could not be absorbed into it, as servers do: got the scheme {scheme}. Only a cap can be added, as "
                'with scheme="soft_cap" or Scheme(softcap=50.0); or bound its learning rates by head, with QuacK'
            )
        if not scheme.pre_norm and not self.pre_norm:
            return (
                "has no norm in front of attention that is for attention alone, with a gain to fold away: got the "
                f"scheme {scheme}, which removes it (pre_norm=False)"
            )
        return None
