"""What is done to attention: the `Scheme` dataclass and the named presets."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hf_qknorm.files.formatting import shorten
from hf_qknorm.ops.norms import NORMS

GAINS: Final = ("shared", "per_head", "scalar", "none")

# Gains with one entry per channel; only beside them does a bias make sense.
CHANNEL_GAINS: Final = ("shared", "per_head")

# What every checkpoint's config.json holds of its scheme: the fields of version 0.1.0. A field that is added later may
# be absent from an older checkpoint, and has then its default, under which nothing changes.
STORED: Final = ("q", "k", "v", "gain", "bias", "p", "scale", "softcap", "pre_norm", "eps")


@dataclass(frozen=True)
class Scheme:
    """How queries, keys and values are normalised, and how attention logits are scaled and capped.

    `q`, `k`, `v` name the norm over head_dim of each projection: "rms", "layer", "l2", "lp", "auto" (the norm
    the model itself uses, known once a model is patched) or None (left as it is). The norm is applied before
    RoPE and before the KV cache.

    `gain` is "shared" (`[D]`, as in Qwen3), "per_head" (`[H, D]`), "scalar" (one number a layer, held by the
    query norm) or "none". `bias` adds a bias of the gain's shape; None means beside LayerNorm only.
    `p` is the order of the "lp" norm. `scale` multiplies q·k; None keeps the model's own (1/√D for most).
    `softcap` c > 0 replaces each logit by c·tanh(logit/c), before mask and softmax; None means no cap.
    `pre_norm=False` removes the norm in front of attention. `eps` is added to the mean square, inside the root.
    `knee` > 0 adds `knee` times the mean square of the vectors that arrive at each norm in calibration text (for
    "layer" less their mean, for "lp" their mean |x|ᵖ): vectors that are short beside it keep their length, up to a
    constant, and long ones are bounded. A norm that has not seen text takes 1 for this mean.

    Raises ValueError, naming the field, for any value or combination that makes no sense.
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
    knee: float = 0.0

    def __post_init__(self) -> None:
        for name in ("q", "k", "v"):
            _require(name, getattr(self, name), getattr(self, name) in (*NORMS, "auto", None),
                     f"one of {_listed((*NORMS, 'auto'))} or None")  # fmt: skip
        _require("gain", self.gain, self.gain in GAINS, f"one of {_listed(GAINS)}")
        _require("bias", self.bias, self.bias is None or isinstance(self.bias, bool), "True, False or None")
        _require("pre_norm", self.pre_norm, isinstance(self.pre_norm, bool), "True or False")
        _require("p", self.p, _is_finite(self.p) and self.p >= 1, "a finite number ≥ 1 (below 1 it is no norm)")
        for name in ("scale", "softcap"):
            value = getattr(self, name)
            _require(name, value, value is None or (_is_finite(value) and value > 0),
                     "a finite number > 0, or None")  # fmt: skip
        _require("eps", self.eps, _is_finite(self.eps) and self.eps > 0, "a finite number > 0")
        _require("knee", self.knee, _is_finite(self.knee) and self.knee >= 0, "a finite number ≥ 0")
        for name in ("p", "scale", "softcap", "eps", "knee"):  # 50 and 50.0 are one scheme, also in JSON
            if getattr(self, name) is not None:
                object.__setattr__(self, name, float(getattr(self, name)))
        ordered = tuple(name for name, kind in NORMS.items() if kind.any_order)
        _require("p", self.p, self.p == 2 or not {*ordered}.isdisjoint(self.norms),
                 f"p = 2, or {_listed(ordered)} among q, k and v: no other norm has an order")  # fmt: skip
        _require("bias", self.bias, not self.bias or (bool(self.norms) and self.gain in CHANNEL_GAINS),
                 f"a norm on q, k or v, and gain {_listed(CHANNEL_GAINS)}: a bias has the gain's shape")  # fmt: skip
        _require("pre_norm", self.pre_norm, self.pre_norm or None not in (self.q, self.k, self.v),
                 "True unless q, k and v are all normed: they must remove the scale that it removed")  # fmt: skip
        _require("knee", self.knee, not self.knee or (bool(self.norms) and self.pre_norm),
                 "0 unless q, k or v is normed and pre_norm is True: with a knee they keep the scale that the norm in "
                 "front of attention must remove")  # fmt: skip

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms of q, k and v, those that are there."""
        return tuple(norm for norm in (self.q, self.k, self.v) if norm is not None)

    def resolve(self, norm: str) -> Scheme:
        """This scheme with "auto" replaced by `norm`, the norm that the model itself uses."""
        q, k, v = (norm if named == "auto" else named for named in (self.q, self.k, self.v))
        return dataclasses.replace(self, q=q, k=k, v=v)

    def has_bias(self, norm: str) -> bool:
        """Whether a `norm` of this scheme has a bias: as `bias` says, and by default with LayerNorm only."""
        if self.bias is not None:
            return self.bias
        return NORMS[norm].biased and self.gain in CHANNEL_GAINS

    def to_dict(self) -> dict[str, Any]:
        """The scheme as JSON-ready data; `Scheme.from_dict` gives it back. Without a knee it is that of version 0.1."""
        data = dataclasses.asdict(self)
        if not self.knee:
            del data["knee"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Scheme:
        """The scheme that `to_dict` wrote. Raises ValueError on unknown keys: they may change what is computed."""
        if not isinstance(data, Mapping):
            raise ValueError(
                f"a scheme that is no preset's name must be a mapping of its fields, got {type(data).__name__}: "
                f"{shorten(data)}. Presets: {', '.join(SCHEMES)}"
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
        """The scheme as a checkpoint's config.json holds it: every field of `STORED`, and perhaps later ones.

        Raises ValueError for a preset's name, and for a field that is absent: a default in its place would change what
        is computed.
        """
        if isinstance(data, str):
            known = f", for {data!r} {SCHEMES[data].to_dict()}" if data in SCHEMES else ""
            raise ValueError(
                f'config.json: "qk_norm" is {shorten(data)}, expected a scheme\'s fields{known}: a preset may change '
                "between versions"
            )
        scheme = cls.from_dict(data)
        if missing := [name for name in STORED if name not in data]:
            raise ValueError(
                f'config.json: "qk_norm" has no {", ".join(map(repr, missing))}, expected all of {", ".join(STORED)}. '
                "Restore the config.json that was saved with the weights"
            )
        return scheme

    @classmethod
    def of(cls, scheme: Scheme | str | Mapping[str, Any]) -> Scheme:
        """A `Scheme` from itself, from a preset's name, or from its JSON form."""
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
        """The fields that differ from their defaults: `q=rms, k=rms, softcap=50.0`."""
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return ", ".join(changed) or "nothing changed"


def _is_finite(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _listed(values: tuple[str, ...]) -> str:
    return ", ".join(f'"{value}"' for value in values)


def _nearest(name: object, known: Iterable[str]) -> str:
    """The end of a sentence about a name that is not known: with the nearest one, if any is near."""
    folded = {_folded(one): one for one in known}
    match = difflib.get_close_matches(_folded(shorten(name).strip("'")), list(folded), n=1)
    return f", did you mean {folded[match[0]]!r}?" if match else "."


def _folded(name: str) -> str:
    """A name for comparisons: in lower case, and "-" and " " as "_"."""
    return re.sub(r"[-\s]", "_", name.strip()).casefold()


def _require(field: str, got: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise ValueError(f"Scheme({field}={shorten(got)}) is not possible: expected {allowed}")


SCHEMES: Final[dict[str, Scheme]] = {
    # Changes nothing: the test that a family is right.
    "none": Scheme(),
    # Rybakov et al. 2024 (arXiv 2410.16682), soft_cap: c = 50 on the raw logits, as Gemma 2.
    "soft_cap": Scheme(softcap=50.0),
    # Ibid., QK_norm (theirs is LayerNorm); with RMSNorm it is Qwen3's attention.
    "qk_norm": Scheme(q="auto", k="auto"),
    # Ibid., QK_norm_cap: both, c = 50.
    "qk_norm_cap": Scheme(q="auto", k="auto", softcap=50.0),
    # Ibid., QKV_norm: queries, keys and values normed, the norm in front of attention removed.
    "qkv_norm": Scheme(q="auto", k="auto", v="auto", pre_norm=False),
    # Queries alone: a per-token temperature, the mildest change that bounds one side.
    "q_norm": Scheme(q="auto"),
    # Henry et al. 2020 (arXiv 2010.04245), QKNorm: l2, one learned g a layer in place of 1/√D.
    "henry": Scheme(q="l2", k="l2", gain="scalar", scale=1.0),
    # López-Rubio et al. 2026 (arXiv 2602.05006), Lp QKNorm: p > 2 did better than 2; one learned scalar.
    "lp": Scheme(q="lp", k="lp", p=3.0, gain="scalar", scale=1.0),
}
