"""The norms over head_dim that a scheme can name. A new norm of these parts is one entry of `NORMS`."""

from __future__ import annotations

from typing import Final, NamedTuple

SHARPNESSES: Final = (1, 2, 4, 8)  # powers of 2: kernels square


class NormKind(NamedTuple):
    """The properties of a norm n(x) = y / size(y) over the D entries of a head: all code decides by these.

    y is x, or x − mean x if `centred`; size(y) is (mean |y|ᵖ + ε^(p/2))^(1/p), times D^(1/p) if `summed`. A sharpness
    s replaces a + b in this size by (aˢ + bˢ)^(1/s). Kernels take a kind as a compile-time constant.
    """

    title: str  # completes "queries are normalised by …"
    centred: bool = False  # the mean of x is subtracted first
    summed: bool = False  # divides by the sum of |y|ᵖ, not by their mean: the result has length 1, not D^(1/p)
    any_order: bool = False  # p is the scheme's, else 2
    biased: bool = False  # has a bias where a scheme does not say

    def order(self, p: float) -> float:
        """The norm's p in a scheme whose `p` this is."""
        return p if self.any_order else 2.0

    def __str__(self) -> str:
        return self.title


NORMS: Final[dict[str, NormKind]] = {
    "rms": NormKind("RMSNorm"),
    "layer": NormKind("LayerNorm", centred=True, biased=True),
    "l2": NormKind("their length (l2)", summed=True),
    "lp": NormKind("their Lp norm", summed=True, any_order=True),
}
