"""`Family`: the properties of a transformers model type that patching needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from hf_qknorm.families.style import Style
from hf_qknorm.scheme import Scheme

CAP_ALONE: Final = 'Only a cap can be added, as with scheme="soft_cap" or Scheme(softcap=50.0)'


# Which layers attend through the window `config.sliding_window`: those for which transformers builds the mask with it.
def nowhere(module: Any) -> bool:
    """Most models: no layer, whatever the config holds."""
    return False


def everywhere(module: Any) -> bool:
    """Mistral: every layer, if the config has a window."""
    return True


def by_layer(module: Any) -> bool:
    """Gemma 2: the layers that were built with a window."""
    return getattr(module, "sliding_window", None) is not None


def by_kind(module: Any) -> bool:
    """EXAONE 4: the layers marked as sliding. The other layers hold the window and do not use it."""
    return bool(module.is_sliding)


def without(setting: str, reason: str) -> Callable[[Any], str | None]:
    """The test of a config that refuses a model with this switch on, for this reason; see `Family.unsupported`."""
    return lambda config: f"{setting}=True: {reason}" if getattr(config, setting) else None


@dataclass(frozen=True)
class Family:
    """A model type of transformers: the attention class that is patched, its style, and the model's own features.

    `attention` is the name of its class; "" stands for each module that calls transformers' attention interface.
    `norm` is the model's own kind of norm. `pre_norm` is the attribute of the decoder layer that holds the norm
    before attention; "" if there is none, or if other modules read its result too. `gain_plus_one`: this norm's gain
    is stored as gain − 1. `rope` tells kernels which channels rotate together, and how the model's cos and sin hold
    the angles (`kernel_rotary`); None if only the model's own code can apply it.

    `own_norms`: the model norms its queries and keys, and its own forward computes attention. `own_cap`: it caps its
    logits, by `attn_logit_softcapping`.
    `latent`: it caches a latent, and projects keys and values from it. `causal`: no token attends to later tokens.
    For `own_norms` and `causal` a string names the switch in the model's config; for `causal`, "!name" is its opposite.
    `slides` tells whether a layer attends through the config's sliding window.
    `restarts` names the model class that, without `position_ids`, numbers the tokens of each call from 0, also those
    behind a cache: patched, it counts the cached tokens (`CountsCached`). "" in other types.
    `unsupported` returns the reason why a model with a given config can't be patched, or None. Cross-attention is
    refused for a style without `project_across`.
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
    restarts: str = ""
    unsupported: Callable[[Any], str | None] | None = None

    def has_norms(self, config: Any) -> bool:
        """Whether a model with this config norms its queries and keys itself."""
        return bool(getattr(config, self.own_norms)) if isinstance(self.own_norms, str) else self.own_norms

    def is_causal(self, config: Any) -> bool:
        """Whether no token attends to later tokens in a model with this config."""
        if isinstance(self.causal, str):
            return bool(getattr(config, self.causal.lstrip("!"))) != self.causal.startswith("!")
        return self.causal

    def runs_own_forward(self, config: Any) -> bool:
        """Whether the attention of a model with this config is computed by the model's own forward; it takes a cap."""
        return not self.attention or self.has_norms(config)

    def refusal(self, config: Any, scheme: Scheme) -> str | None:
        """Return the reason why a model with this config can't have `scheme`, or None."""
        reads = hasattr(type(config), "add_cross_attention")  # a config holds any setting, and these types read it
        if reads and config.add_cross_attention and self.style.project_across is None:
            return "is not supported with add_cross_attention=True: its layers attend to an encoder too"
        if self.unsupported is not None and (reason := self.unsupported(config)):
            return f"is not supported with {reason}"
        if (scheme.norms or scheme.scale is not None) and self.has_norms(config):
            return (
                f"already normalises its queries and keys, and norms are not stacked: got the scheme {scheme}. "
                f"{CAP_ALONE}"
            )
        if scheme.norms and self.latent and scheme.gain == "scalar":
            return (
                f"norms the parts of each head with and without RoPE separately: got the scheme {scheme}, whose one "
                'gain a layer can\'t weigh them against each other. Take gain="shared" or "per_head", as in qk_norm'
            )
        if not scheme.pre_norm and self.latent:
            return (
                f"projects to latents that have norms of their own: got the scheme {scheme}, and folding the norm "
                "before attention (pre_norm=False) into these projections is not supported. Take pre_norm=True"
            )
        if not scheme.pre_norm and not self.pre_norm:
            return (
                "has no norm before attention that serves attention alone and has a gain to fold away: got the "
                f"scheme {scheme}, which removes it (pre_norm=False)"
            )
        return None
