"""The arithmetic of one row of a head on the device: its norm, the pairs of its rotation, and the norm's gradient.

Tiles are fp32 `[M, P]` with P the power of two that holds head_dim; columns from head_dim on are padding and hold 0.
All norms have one form, n = (x − shift)·factor with two numbers per row, so that any column can be computed alone. NORM
is `arguments.NormConstants`; without a norm it is None, and the numbers are 0 and 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(1e-30)  # of a ratio: 0 has an infinite logarithm


@triton.jit
def statistics(x, real, norm, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """Shift, factor and pull `[M]`, and the unit, of the rows x `[M, P]`; `real` `[P]` is False for padding.

    `norm` is `NormArguments`. The pull times the sum of dn·n is the part of a gradient dn of n that a row's divisor
    takes back; of an Lp norm this holds for n times the unit, a number. A row of zeros (for a centred norm: of equal
    entries) has factor 0: it stays zero and gets no gradient.
    """
    zeros = tl.zeros([x.shape[0]], tl.float32)
    shift = zeros
    factor = zeros + 1.0
    unit = 1.0
    pull = zeros
    if NORM is not None:
        order = 2.0
        if NORM.any_order:
            order = norm.p
        eps, length, sharpness = _shape(norm, order, HEAD_DIM, NORM)
        if NORM.centred:
            shift = tl.sum(x, 1) / HEAD_DIM
            x = tl.where(real[None, :], x - shift[:, None], 0.0)
        if NORM.any_order:
            largest = tl.max(tl.abs(x), 1)
            floor = tl.sqrt_rn(zeros + eps)
            peak = tl.maximum(largest, floor)  # |x|ᵖ must not overflow
            own = tl.sum(_power(tl.abs(x) / peak[:, None], order), 1) / HEAD_DIM
            size = _smooth_maximum(own, _power(floor / peak, order), sharpness)
            factor = tl.where(largest > 0, tl.exp2(-tl.log2(size) / order) * (length / peak), 0.0)
            unit = 1.0 / length  # powers of n itself would overflow
            pull = zeros + 1.0 / HEAD_DIM
        else:
            own = tl.sum(x * x, 1) / HEAD_DIM
            size = _smooth_maximum(own, zeros + eps, sharpness)
            factor = tl.where(own > 0, length / tl.sqrt_rn(size), 0.0)
            pull = zeros + 1.0 / (length * length * HEAD_DIM)
        if sharpness > 1.0:
            pull *= tl.exp2((sharpness - 1.0) * tl.log2(tl.maximum(own / size, LEAST)))
    return shift, factor, unit, pull


@triton.jit
def _shape(norm, order, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """ε, the factor beside the gain, and the sharpness: the norm's `norms.Shape`, read in bfloat16."""
    length = 1.0
    if NORM.summed:
        length = tl.exp2(-tl.log2(tl.full([], HEAD_DIM, tl.float32)) / order)
    eps = norm.eps
    sharpness = 1.0
    if norm.knee is not None:
        a = tl.load(norm.knee).to(tl.bfloat16).to(tl.float32)
        b = tl.load(norm.knee + 1).to(tl.bfloat16).to(tl.float32)
        sharpness = tl.load(norm.knee + 2).to(tl.bfloat16).to(tl.float32)
        eps = norm.eps * tl.exp2(a)
        most = tl.maximum(a, b)
        total = 1.0 + tl.exp2((tl.minimum(a, b) - most) * (sharpness * order * 0.5))
        kept = tl.sqrt_rn(norm.eps * tl.exp2(most)) * tl.exp2(tl.log2(total) / (sharpness * order))
        length = tl.where(b == 0, length, kept)
    return eps, length, sharpness


@triton.jit
def backward(dn, x, real, shift, factor, unit, pull, p, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """The gradient of x `[M, P]` and n itself, for the gradient dn of n = (x − shift)·factor; padding in dn is zero."""
    n = tl.where(real[None, :], (x - shift[:, None]) * factor[:, None], 0.0)
    dx = dn
    if NORM is not None:
        slope = n
        if NORM.any_order:
            size = _power(tl.abs(n) * unit, p - 1.0)
            slope = tl.where(n < 0, -size, size)
        dx = dn - slope * (tl.sum(dn * n, 1) * unit * pull)[:, None]
        if NORM.centred:
            dx -= (tl.sum(dx if NORM.any_order else dn, 1) / HEAD_DIM)[:, None]
    return dx * factor[:, None], n


@triton.jit
def _smooth_maximum(a, b, sharpness):
    """(aˢ + bˢ)^(1/s) for numbers that are not negative, by the ratio of the smaller to the larger."""
    total = a + b
    if sharpness > 1.0:
        larger = tl.maximum(a, b)
        ratio = tl.maximum(tl.minimum(a, b) / larger, LEAST)
        total = larger * tl.exp2(tl.log2(1.0 + tl.exp2(sharpness * tl.log2(ratio))) / sharpness)
    return total


@triton.jit
def _power(x, p):
    """xᵖ for x ≥ 0 and p ≥ 0, with 0⁰ = 0: a zero entry adds nothing to the slope of an Lp norm."""
    return tl.where(x > 0, tl.exp2(p * tl.log2(tl.maximum(x, 1e-37))), 0.0)


@triton.jit
def partners(columns, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """For each column: the other one of its rotated pair, the index of its angle, and the sign of the other one.

    Columns from ROTARY on are not rotated; they are their own partners.
    """
    if INTERLEAVED:
        other = columns ^ 1
        angle = columns // 2
        sign = tl.where(columns % 2 == 0, -1.0, 1.0)
    else:
        other = tl.where(columns < ROTARY // 2, columns + ROTARY // 2, columns - ROTARY // 2)
        angle = columns % (ROTARY // 2)
        sign = tl.where(columns < ROTARY // 2, -1.0, 1.0)
    return tl.where(columns < ROTARY, other, columns), angle, sign
