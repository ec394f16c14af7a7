"""The specification: head norms, rotation and attention in plain PyTorch. Kernels never import it.

Any device, any dtype up to fp64, autograd throughout. Shapes: B batch, H query heads, Hk key/value heads (H is a
multiple of Hk), T query length, S key length, D head_dim; values may have another. Query i stands at key position
i + S - T.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_qknorm.norms import NORMS
from hf_qknorm.ops.types import Heads, Norm, Options, Rotary, Visible


class Attended(NamedTuple):
    """The results of `attention`; statistics are per head, `[H]`, over all pairs that are not masked."""

    out: Tensor  # [B, H, T, D]
    weights: Tensor  # [B, H, T, S], after softmax, before dropout
    max_logit: Tensor  # [H]: largest |scale·q·k|, before the cap
    entropy: Tensor  # [H]: mean over the queries that see any key, in nats


def head_norm(
    x: Tensor,
    norm: str,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    p: float = 2.0,
    knee: Tensor | None = None,
) -> Tensor:
    """Normalise the last axis of `x` `[..., H, D]`, then apply gain and bias (each `[D]`, `[H, D]` or `[1]`).

    rms:   x / √(mean x² + eps)                   layer: the same of x − mean x
    l2:    x / √(D·(mean x² + eps))               lp:    x / (D·(mean |x|ᵖ + eps^(p/2)))^(1/p)

    A `knee` `[3]` is a `norms.Shape` (a, b, s), read in bfloat16: ε = eps·2ᵃ takes the place of eps, and each sum u + e
    in these roots becomes M(u, e) = (uˢ + eˢ)^(1/s): the larger s, the more exactly short vectors keep their length, up
    to a constant. Where b is not 0, the result is multiplied by the root of M(P^(p/2), ε^(p/2)) with P = eps·2ᵇ, and
    not divided by D: a vector of mean |x|ᵖ = P^(p/2) keeps its length.

    `norm` is a name of `norms.NORMS`, whose properties combine these formulas. Raises ValueError for another name.

    Computes in fp32 (fp64 stays fp64) and rounds once, to the dtype of `x`. A row of zeros (if centred: of equal
    entries) is padding or dead: it stays zero, and its gradient is zero instead of 1/√eps times the output's.
    """
    if norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r}: expected one of {', '.join(map(repr, NORMS))}")
    kind = NORMS[norm]
    y = x if x.dtype == torch.float64 else x.float()
    order, columns = kind.order(p), y.shape[-1] if kind.summed else 1
    epsilon: Any = eps
    sharpness, length = None, columns ** (-1 / order)
    if knee is not None:
        a, b, sharpness = knee.bfloat16().to(y.dtype).unbind()
        epsilon, length = eps * torch.exp2(a), _kept_length(a, b, sharpness, eps, order, length)
    if kind.centred:
        y = y - y.mean(-1, keepdim=True)
    if not kind.any_order:
        square = y.pow(2).mean(-1, keepdim=True)
        factor = torch.where(square > 0, torch.rsqrt(smooth_maximum(square, epsilon, sharpness)), 0.0)
    else:
        largest = y.detach().abs().amax(-1, keepdim=True)
        root = torch.as_tensor(epsilon**0.5, dtype=y.dtype, device=y.device)
        peak = torch.maximum(largest, root)  # |x|ᵖ must not overflow
        mean = (y.abs() / peak).pow(p).mean(-1, keepdim=True)
        power = smooth_maximum(mean, (root / peak).pow(p), sharpness)
        factor = torch.where(largest > 0, 1 / (peak * power.pow(1 / p)), 0.0)
    y = y * (factor * length)
    y = y if gain is None else gain.to(y.dtype) * y
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(x.dtype)


def smooth_maximum(a: Tensor, b: float | Tensor, sharpness: Tensor | None) -> Tensor:
    """(aˢ + bˢ)^(1/s) for a ≥ 0, b > 0 and s = `sharpness`: between max(a, b) and their sum, which it is for s = 1.

    Computed from the larger of both and their ratio: powers of the numbers themselves would overflow. A ratio below
    1e-30 adds nothing for s > 1, and would have an infinite logarithm.
    """
    if sharpness is None:
        return a + b
    b = torch.as_tensor(b, dtype=a.dtype, device=a.device)
    larger, smaller = torch.maximum(a, b), torch.minimum(a, b)
    power = torch.exp2(sharpness * torch.log2((smaller / larger).clamp_min(1e-30)))
    return torch.where(sharpness == 1, a + b, larger * torch.exp2(torch.log2(1 + power) / sharpness))


def _kept_length(a: Tensor, b: Tensor, sharpness: Tensor, eps: float, order: float, plain: float) -> Tensor:
    """M(P^(p/2), ε^(p/2))^(1/p), from the larger of P and ε and their ratio; `plain` where P is not known."""
    least, most = torch.minimum(a, b), torch.maximum(a, b)
    power = torch.exp2((least - most) * (sharpness * order / 2))
    root = torch.exp2(torch.log2(1 + power) / (sharpness * order))
    return torch.where(b == 0, plain, (eps * torch.exp2(most)).sqrt() * root)


def norm_rope(heads: Heads) -> tuple[Tensor, Tensor]:
    """Norm and rotate queries and keys: the values of `library.norm_rope`, rounded after the norm too."""
    q, k, _, q_norm, k_norm, rotary = heads
    return norm_rope_one(q, q_norm, rotary), norm_rope_one(k, k_norm, rotary)


def norm_rope_one(x: Tensor, norm: Norm, rotary: Rotary | None) -> Tensor:
    """Norm and rotate queries or keys `[B, H, T, D]`."""
    if norm.kind != "none":
        x = head_norm(x.transpose(1, 2), *norm).transpose(1, 2)
    if rotary is None:
        return x
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (part.to(wide)[:, None] for part in rotary[:2])
    turned, rest = x.to(wide).tensor_split([2 * cos.shape[-1]], -1)
    a, b = (turned[..., ::2], turned[..., 1::2]) if rotary.interleaved else turned.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(pair, -1).flatten(-2) if rotary.interleaved else torch.cat(pair, -1)
    return torch.cat([turned, rest], -1).to(x.dtype)


def visible(
    queries: int, keys: int, causal: bool, window: int | None = None, device: torch.device | str = "cpu"
) -> Tensor:
    """Whether each query sees each key, `[T, S]`: causal, and at most `window` keys back (its own included).

    Without `causal` a window reaches `window` positions to either side, as in transformers' bidirectional masks.
    """
    distance = torch.arange(queries, device=device)[:, None] + (keys - queries)
    distance = distance - torch.arange(keys, device=device)
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen = seen & (distance < window if causal else distance.abs() <= window)
    return seen


def in_ranges(ranges: Tensor, keys: int) -> Tensor:
    """Whether each query sees each key by its range, `[B or 1, 1, T, S]`."""
    start, stop = ranges[:, None, :, :, None].unbind(-2)
    key = torch.arange(keys, device=ranges.device)
    return (key >= start) & (key < stop)


def attend(heads: Heads, visible: Visible, options: Options, dropout_mask: Tensor | None = None) -> Attended:
    """`attention` of a call, after the norms and rotation of its heads; the mask takes the place of rate and seed."""
    q, k = norm_rope(heads)
    (ranges, sinks, _, mask), (scale, softcap, causal, window, _) = visible, options
    rules: dict[str, Any] = {"scale": scale, "softcap": softcap, "causal": causal, "window": window}
    return attention(q, k, heads.v, **rules, mask=mask, ranges=ranges, sinks=sinks, dropout_mask=dropout_mask)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = False,
    window: int | None = None,
    mask: Tensor | None = None,
    ranges: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_mask: Tensor | None = None,
) -> Attended:
    """softmax(cap(scale·q·kᵀ) + mask)·v, where cap(s) = softcap·tanh(s/softcap).

    q `[B, H, T, D]`; k, v `[B, Hk, S, D]`; `scale` defaults to 1/√D. `mask` is boolean (True: may attend) or
    additive, broadcastable to `[B, H, T, S]`, on top of `causal` and `window`, and so are `ranges` `[B or 1, T, 2]`:
    query t sees the keys from ranges[b, t, 0] on, before ranges[b, t, 1]. `sinks` are logits of one extra key without
    a value, `[H]` (or `[B, H, T]`, one for each query). `dropout_mask` `[B, H, T, S]` multiplies the weights (0 or
    1/(1 − rate)).
    The softmax runs in fp32 at least. A query that may attend to nothing gives 0, with zero gradients.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.matmul(q, k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    raw = logits.detach().abs()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    seen = visible(q.shape[2], k.shape[2], causal, window, q.device).expand(logits.shape)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        logits = logits + mask
        seen = seen & (mask > torch.finfo(mask.dtype).min)  # transformers masks additively with finfo.min
    if ranges is not None:
        seen = seen & in_ranges(ranges, k.shape[2])
    logits = logits.masked_fill(~seen, -math.inf)
    empty = ~seen.any(-1, keepdim=True)
    if sinks is not None:
        sink = (sinks[:, None] if sinks.dim() == 1 else sinks).to(logits.dtype).expand(logits.shape[:3])
        logits = torch.cat([logits, sink[..., None]], dim=-1)
    weights = torch.softmax(logits.masked_fill(empty, 0.0), dim=-1)
    entropy = -torch.special.xlogy(weights, weights).sum(-1).detach()
    weights = weights[..., : k.shape[2]].masked_fill(empty, 0.0)
    dropped = weights if dropout_mask is None else weights * dropout_mask
    out = torch.matmul(dropped.to(v.dtype), v)
    rows = (~empty).expand(*logits.shape[:3], 1).sum((0, 2, 3)).clamp_min(1)
    return Attended(
        out=out,
        weights=weights,
        max_logit=raw.masked_fill(~seen, 0.0).amax((0, 2, 3)) if raw.numel() else raw.new_zeros(raw.shape[1]),
        entropy=entropy.masked_fill(empty.squeeze(-1), 0.0).sum((0, 2)) / rows,
    )
