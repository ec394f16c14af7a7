"""The norms over head_dim that a scheme can name. A new norm of these parts is one entry of `NORMS`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:  # the command's help needs no torch
    from torch import Tensor

OPENED: Final = 30.0  # log2 of the knee at which a norm is a constant factor, to a rounding in fp32
STEP: Final = 2.0**-8  # of the numbers of a shape


class NormKind(NamedTuple):
    """The properties of a norm n(x) = y / size(y) over the D entries of a head: all code decides by these.

    y is x, or x − mean x if `centred`; size(y) is (mean |y|ᵖ + ε^(p/2))^(1/p), times D^(1/p) if `summed`. A `Shape`
    changes this size. Kernels take a kind as a compile-time constant.
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


class Shape(NamedTuple):
    """The shape of a norm, as its buffer `knee` `[3]` holds it: log2(ε/eps), log2(P/eps) and the sharpness s.

    eps is the scheme's; P is the mean |x|ᵖ of the norm's inputs in calibration text, to the power 2/p. The norm divides
    by M(mean |x|ᵖ, ε^(p/2))^(1/p) with M(a, b) = (aˢ + bˢ)^(1/s). Where P is known, log2(P/eps) ≠ 0, it also multiplies
    by M(P^(p/2), ε^(p/2))^(1/p), so that a vector of this mean keeps its length. The default is the plain norm.

    All three are multiples of 1/256 that bfloat16 and float16 hold, so that no cast changes a norm.
    """

    epsilon: float = 0.0
    power: float = 0.0
    sharpness: float = 1.0

    @classmethod
    def of(cls, knee: Tensor) -> Shape:
        """The shape in a buffer; it waits for a GPU."""
        return cls(*knee.bfloat16().tolist())

    @classmethod
    def rounded(cls, knee: float, power: float, sharpness: float, eps: float, order: float) -> Shape:
        """The shape nearest to a knee, for a mean |x|ᵖ of `power`, with P at least eps.

        Without a knee it is RMSNorm's form with its length kept. Raises ValueError for a knee or power that is negative
        or NaN, and for an ε beyond fp32.
        """
        half = order / 2
        if not (knee >= 0 and 0 <= power < math.inf):
            raise ValueError(
                f"a knee of {knee:g} and a mean |x|ᵖ of {power:g}: expected numbers ≥ 0. Check that the model's "
                "queries and keys are finite"
            )
        b = max(on_grid(math.log2(max(power, eps**half)) / half - math.log2(eps)), STEP)
        if not knee:
            return cls(0.0, b)
        a = b + OPENED if knee >= 2.0**OPENED else math.log2(1 + knee * 2 ** (b * half)) / half
        if not eps * 2.0**a < 2.0**128:
            raise ValueError(f"a knee of {knee:g} and a mean |x|ᵖ of {power:g} give ε = {eps * 2.0**a:g}, beyond fp32")
        return cls(max(on_grid(a), STEP), b, on_grid(sharpness))

    def knee(self, order: float) -> float:
        """The knee of a norm of this order, (ε − eps)/P in powers of p/2: 0 for a plain norm, ∞ for an opened one."""
        if self.power and self.epsilon - self.power >= OPENED - 0.5:
            return math.inf
        half = order / 2
        return math.expm1(self.epsilon * half * math.log(2)) / 2.0 ** (self.power * half)

    def length(self, eps: float, order: float, columns: int) -> float:
        """The factor of a norm beside its gain; `columns` is D for a `summed` norm, else 1."""
        if not self.power:
            return float(columns ** (-1 / order))
        least, most = sorted(self[:2])
        size = (1 + 2.0 ** ((least - most) * order / 2 * self.sharpness)) ** (1 / self.sharpness)
        return float(math.sqrt(eps * 2.0**most) * size ** (1 / order))


PLAIN: Final = Shape()


def on_grid(x: float) -> float:
    """The multiple of 1/256 nearest to x that bfloat16 holds, and therefore float16 too."""
    fraction, exponent = math.frexp(round(x / STEP) * STEP)
    return math.ldexp(round(fraction * 2**8), exponent - 8)


def shown_knee(knee: float) -> str:
    """A knee as text; reports have 2³⁰ for ∞, which JSON lacks."""
    return "∞" if knee >= 2.0 ** (OPENED - 0.5) else f"{knee:.3g}"
