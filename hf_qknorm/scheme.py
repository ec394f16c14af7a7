"""How attention is changed: the `Scheme` dataclass and the presets in `SCHEMES`.

>>> print(qk.SCHEMES["henry"])
q=l2, k=l2, gain=scalar, scale=1.0
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

from hf_qknorm.files.formatting import shorten
from hf_qknorm.norms import NORMS

GAINS: Final = ("shared", "per_head", "scalar", "none")

# Gains with one entry per channel: a bias needs one of them.
CHANNEL_GAINS: Final = ("shared", "per_head")


@dataclass(frozen=True)
class Scheme:
    """The norms of queries, keys and values, and the scale and cap of the attention logits.

    `q`, `k`, `v` are the norm over head_dim of each projection: "rms", "layer", "l2", "lp", "auto" ("rms" once a model
    is patched: LayerNorm loses the mean of each head for good) or None. The norm is applied before RoPE and the KV
    cache.
    `gain` is "shared" (`[D]`, as in Qwen3), "per_head" (`[H, D]`), "scalar" (one number per layer for q·k, held by the
    query norm if there is one, and one for the values) or "none". `bias` adds a bias of the gain's shape; None means
    with LayerNorm only.
    `p` is the order of the "lp" norm.
    `scale` multiplies q·k; None means the model's own (1/√D for most).
    `softcap` c > 0 replaces each logit by c·tanh(logit/c), before mask and softmax; None means no cap.
    `pre_norm=False` removes the norm before attention.
    `eps` is added to the mean square, inside the root.
    Raises ValueError, naming the field, for a value or combination that is not possible.

    >>> scheme = qk.Scheme(q="rms", k="rms", softcap=50)
    >>> print(scheme)
    q=rms, k=rms, softcap=50.0
    >>> qk.Scheme.from_dict(scheme.to_dict()) == scheme
    True
    """

    q: str | None = None
    k: str | None = None
    v: str | None = None
    gain: str = "shared"
    bias: bool | None = None
    p: float = 2.0
    scale: float | None = None
    softcap: float | None = None
    pre_norm: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        named, ordered = (*NORMS, "auto"), tuple(name for name, kind in NORMS.items() if kind.any_order)
        for name in ("q", "k", "v"):
            self._require(name, getattr(self, name) in (*named, None), f"one of {_listed(named)} or None")
        self._require("gain", self.gain in GAINS, f"one of {_listed(GAINS)}")
        self._require("bias", self.bias is None or isinstance(self.bias, bool), "True, False or None")
        self._require("pre_norm", isinstance(self.pre_norm, bool), "True or False")
        self._require("p", _is_finite(self.p) and self.p >= 1, "a finite number ≥ 1 (below 1 it is no norm)")
        for name in ("scale", "softcap"):
            value = getattr(self, name)
            self._require(name, value is None or (_is_finite(value) and value > 0), "a finite number > 0, or None")
        self._require("eps", _is_finite(self.eps) and self.eps > 0, "a finite number > 0")
        for name in ("p", "scale", "softcap", "eps"):  # 50 and 50.0 are the same scheme, in JSON too
            if getattr(self, name) is not None:
                object.__setattr__(self, name, float(getattr(self, name)))
        expected = f"p = 2, or {_listed(ordered)} among q, k and v: no other norm has an order"
        self._require("p", self.p == 2 or not {*ordered}.isdisjoint(self.norms), expected)
        expected = f"a norm on q, k or v, and gain {_listed(CHANNEL_GAINS)}: a bias has the gain's shape"
        self._require("bias", not self.bias or (bool(self.norms) and self.gain in CHANNEL_GAINS), expected)
        expected = "True unless q, k and v are all normed: their norms then remove the scale"
        self._require("pre_norm", self.pre_norm or None not in (self.q, self.k, self.v), expected)

    def _require(self, field: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"Scheme({field}={shorten(getattr(self, field))}) is not possible: expected {expected}")

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms of q, k and v, without None."""
        return tuple(norm for norm in (self.q, self.k, self.v) if norm is not None)

    @property
    def changes_nothing(self) -> bool:
        """Whether attention is the model's own, as with "none"."""
        return not self.norms and self.scale is self.softcap is None

    def resolve(self) -> Scheme:
        """Return the scheme with "rms" in place of "auto"."""
        q, k, v = ("rms" if named == "auto" else named for named in (self.q, self.k, self.v))
        return dataclasses.replace(self, q=q, k=k, v=v)

    def has_bias(self, norm: str) -> bool:
        """Whether a `norm` of this scheme has a bias; by default LayerNorm has one."""
        return NORMS[norm].biased and self.gain in CHANNEL_GAINS if self.bias is None else self.bias

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {**vars(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Scheme:
        """Return the scheme that `to_dict` wrote.

        Raises ValueError for unknown keys, which could change the result.
        """
        if not isinstance(data, Mapping):
            raise ValueError(
                f"a scheme is a preset's name or a mapping of its fields, got {type(data).__name__}: {shorten(data)}. "
                f"Presets: {', '.join(SCHEMES)}"
            )
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := [key for key in data if key not in known]:
            raise ValueError(
                f"unknown scheme field {shorten(unknown[0])}{_nearest(unknown[0], known)} Known fields: "
                f"{', '.join(known)}. A checkpoint from a newer hf_qknorm needs that version to load."
            )
        return cls(**data)

    @classmethod
    def stored(cls, data: Any) -> Scheme:
        """Return the scheme in a checkpoint's config.json, which has every field.

        Raises ValueError for a preset's name, and for a missing field, whose default could change the result.
        """
        if isinstance(data, str):
            known = f", for {data!r} {SCHEMES[data].to_dict()}" if data in SCHEMES else ""
            raise ValueError(
                f'config.json: "qk_norm" is {shorten(data)}, expected a scheme\'s fields{known}: a preset may change '
                "between versions"
            )
        scheme = cls.from_dict(data)
        if missing := [field.name for field in dataclasses.fields(cls) if field.name not in data]:
            raise ValueError(
                f'config.json: "qk_norm" has no {", ".join(map(repr, missing))}, expected every field. '
                "Restore the config.json that was saved with the weights"
            )
        return scheme

    @classmethod
    def of(cls, scheme: Scheme | str | Mapping[str, Any]) -> Scheme:
        """Return the `Scheme` given as itself, as a preset's name, or in its JSON form."""
        if isinstance(scheme, Scheme):
            return scheme
        if isinstance(scheme, str):
            if scheme not in SCHEMES:
                raise ValueError(
                    f"unknown scheme {shorten(scheme)}{_nearest(scheme, SCHEMES)} Presets: {', '.join(SCHEMES)}; "
                    'or spell one out: Scheme(q="rms", k="rms", softcap=50.0)'
                )
            return SCHEMES[scheme]
        return cls.from_dict(scheme)

    def __str__(self) -> str:
        """Return the fields that differ from their defaults: `q=rms, k=rms, softcap=50.0`."""
        default = vars(Scheme())
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != default[name]]
        return ", ".join(changed) or "nothing changed"


def in_words(schemes: Iterable[tuple[Any, Scheme]]) -> str:
    """The schemes of a model's parts, each with its model type: "q=rms, k=rms, softcap=50.0 in qknorm_llama"."""
    found = {f"{scheme} in {model_type}" for model_type, scheme in schemes if not scheme.changes_nothing}
    return "; ".join(sorted(found)) or "no scheme"


def field_values() -> dict[str, str]:
    """The values that each field of a scheme can have, as text."""
    norm, switch, number = " | ".join((*NORMS, "auto")), "true | false", "a number > 0"
    return {
        **{"q": norm, "k": norm, "v": norm, "gain": " | ".join(GAINS), "bias": switch, "p": "a number ≥ 1"},
        **{"scale": number, "softcap": number, "eps": number, "pre_norm": switch},
    }


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _listed(values: tuple[str, ...]) -> str:
    return ", ".join(f'"{value}"' for value in values)


def _nearest(name: object, known: Iterable[str]) -> str:
    """End a sentence about an unknown name with the nearest known name, if there is one."""
    folded = {_folded(one): one for one in known}
    match = get_close_matches(_folded(shorten(name).strip("'")), list(folded), n=1)
    return f", did you mean {folded[match[0]]!r}?" if match else "."


def _folded(name: str) -> str:
    """Return a name for comparisons: in lower case, with "_" for "-" and " "."""
    return re.sub(r"[-\s]", "_", name.strip()).casefold()


SCHEMES: Final[dict[str, Scheme]] = {
    # Changes nothing. Tests of families compare it with the unpatched model.
    "none": Scheme(),
    # Rybakov et al. 2024 (arXiv 2410.16682), soft_cap: c = 50 on the raw logits, as in Gemma 2.
    "soft_cap": Scheme(softcap=50.0),
    # Ibid., QK_norm (theirs is LayerNorm); with RMSNorm it is Qwen3's attention.
    "qk_norm": Scheme(q="auto", k="auto"),
    # Ibid., QK_norm_cap: both, c = 50.
    "qk_norm_cap": Scheme(q="auto", k="auto", softcap=50.0),
    # Ibid., QKV_norm: queries, keys and values normed, the norm before attention removed.
    "qkv_norm": Scheme(q="auto", k="auto", v="auto", pre_norm=False),
    # Queries alone: a temperature per token, which bounds one factor of the logits.
    "q_norm": Scheme(q="auto"),
    # Henry et al. 2020 (arXiv 2010.04245), QKNorm: l2, one learned g per layer in place of 1/√D.
    "henry": Scheme(q="l2", k="l2", gain="scalar", scale=1.0),
    # López-Rubio et al. 2026 (arXiv 2602.05006), Lp QKNorm: p > 2 did better than 2; one learned scalar.
    "lp": Scheme(q="lp", k="lp", p=3.0, gain="scalar", scale=1.0),
}
