"""The arithmetic of one row of a head on the device: its norm, the pairs of its rotation, and the norm's gradient.

Tiles are fp32 `[M, P]` with P the power of two that holds head_dim; columns from head_dim on are padding and hold 0.
All norms have one form, n = (x − shift)·factor with two numbers per row, so that any column can be computed alone. NORM
is `arguments.NormConstants`; without a norm it is None, and the numbers are 0 and 1.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def statistics(x, real, norm, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """Shift, factor and share `[M]` of the rows x `[M, P]`; `real` `[P]` is False for padding. `norm`: `NormArguments`.

    The share is the part of a row's own size in its divisor. A row of zeros (for a centred norm: of equal entries) has
    factor and share 0: it stays zero and gets no gradient.
    """
    eps = norm.eps
    if norm.stored_eps is not None:
        eps = tl.load(norm.stored_eps).to(tl.float32)
    zeros = tl.zeros([x.shape[0]], tl.float32)
    shift = zeros
    factor = zeros + 1.0
    share = zeros
    if NORM is not None:
        if NORM.centred:
            shift = tl.sum(x, 1) / HEAD_DIM
            x = tl.where(real[None, :], x - shift[:, None], 0.0)
        if NORM.any_order:
            largest = tl.max(tl.abs(x), 1)
            floor = tl.sqrt_rn(zeros + eps)
            peak = tl.maximum(largest, floor)  # |x|ᵖ must not overflow
            own = tl.sum(_power(tl.abs(x) / peak[:, None], norm.p), 1)
            power = _smooth_maximum(own, HEAD_DIM * _power(floor / peak, norm.p), NORM.sharpness)
            share = tl.where(largest > 0, own / power, 0.0)
            if not NORM.summed:
                power = power / HEAD_DIM
            factor = tl.where(largest > 0, tl.exp2(-tl.log2(power) / norm.p) / peak, 0.0)
        else:
            square = tl.sum(x * x, 1) / HEAD_DIM
            size = _smooth_maximum(square, eps, NORM.sharpness)
            share = tl.where(square > 0, square / size, 0.0)
            factor = tl.where(square > 0, 1.0 / tl.sqrt_rn(size), 0.0)
            if NORM.summed:
                factor = factor * (HEAD_DIM**-0.5)
    return shift, factor, share


@triton.jit
def backward(dn, x, real, shift, factor, share, p, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """The gradient of x `[M, P]` and n itself, for the gradient dn of n = (x − shift)·factor; padding in dn is zero."""
    n = tl.where(real[None, :], (x - shift[:, None]) * factor[:, None], 0.0)
    dx = dn
    if NORM is not None:
        along = tl.sum(dn * n, 1)[:, None]
        if not NORM.summed:
            along = along / HEAD_DIM
        slope = n
        if NORM.any_order:
            size = _power(tl.abs(n), p - 1.0)
            slope = tl.where(n < 0, -size, size)
        if NORM.sharpness > 1:  # the divisor's slope; its power would enlarge the errors of a share that is made of n
            along *= _odd_power(share[:, None], NORM.sharpness)
        dx = dn - slope * along
        if NORM.centred:
            dx -= (tl.sum(dx if NORM.any_order else dn, 1) / HEAD_DIM)[:, None]
    return dx * factor[:, None], n


@triton.jit
def _smooth_maximum(a, b, SHARPNESS: tl.constexpr):
    """(aˢ + bˢ)^(1/s) for numbers that are not negative, by the ratio of the smaller to the larger."""
    total = a + b
    if SHARPNESS > 1:
        larger = tl.maximum(a, b)
        ratio = tl.minimum(a, b) / larger
        total = 1.0 + ratio * _odd_power(ratio, SHARPNESS)
        total = tl.sqrt_rn(total)
        if SHARPNESS > 2:
            total = tl.sqrt_rn(total)
        if SHARPNESS > 4:
            total = tl.sqrt_rn(total)
        total = larger * total
    return total


@triton.jit
def _odd_power(x, SHARPNESS: tl.constexpr):
    """x^(s − 1) for s = 2, 4 or 8."""
    power = x
    if SHARPNESS > 2:
        power = power * power * x
    if SHARPNESS > 4:
        power = power * power * x
    return power


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
