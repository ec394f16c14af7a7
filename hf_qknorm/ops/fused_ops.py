"""The fused operators as torch knows them: schema, implementation, fake, autograd. Kernels load at the first call."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from hf_qknorm.ops.fused_checks import (
    Ends,
    check_attention,
    check_cache,
    check_gradients,
    check_norm_rope,
    check_positions,
)
from hf_qknorm.ops.types import Heads, Norm, Options, Rotary, Visible, laid_out

OPERATORS: Final = torch.ops.hf_qknorm

PARTS = (
    "Tensor? q_gain, Tensor? q_bias, Tensor? q_blend, Tensor? q_eps, "
    "Tensor? k_gain, Tensor? k_bias, Tensor? k_blend, Tensor? k_eps, Tensor? cos, Tensor? sin"
)
VISIBLE = "Tensor? ranges, Tensor? sinks, Tensor? seed"
SETTINGS = "str q_norm, str k_norm, float[] eps, float[] p, bool interleaved"
OPTIONS = "float scale, float? softcap, bool causal, int? window, float dropout"

torch.library.define(
    "hf_qknorm::fused_attention",
    f"(Tensor q, Tensor k, Tensor v, {PARTS}, {VISIBLE}, {SETTINGS}, {OPTIONS}, bool statistics) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "hf_qknorm::fused_attention_backward",
    f"(Tensor grad, Tensor out, Tensor normaliser, Tensor q, Tensor k, Tensor v, {PARTS}, {VISIBLE}, {SETTINGS}, "
    f"{OPTIONS}) -> Tensor[]",
)
torch.library.define("hf_qknorm::norm_rope", f"(Tensor q, Tensor? k, {PARTS}, {SETTINGS}) -> (Tensor, Tensor)")
torch.library.define(
    "hf_qknorm::norm_rope_into",
    f"(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor positions, {PARTS}, {SETTINGS}) "
    "-> Tensor",
)
torch.library.define(
    "hf_qknorm::norm_rope_backward",
    f"(Tensor dq, Tensor? dk, Tensor q, Tensor? k, {PARTS}, {SETTINGS}) -> Tensor[]",
)

N_PARTS, N_VISIBLE, N_SETTINGS = 10, 3, 5


def flatten(q_norm: Norm, k_norm: Norm, rotary: Rotary | None) -> tuple[tuple[Tensor | None, ...], tuple[Any, ...]]:
    """Norms and rotation as the schemas have them: tensors (PARTS) and the rest (SETTINGS)."""
    cos, sin, interleaved = (None, None, False) if rotary is None else rotary
    (q_eps, q_number), (k_eps, k_number) = q_norm.eps_parts, k_norm.eps_parts
    parts = (q_norm.gain, q_norm.bias, q_norm.blend, q_eps, k_norm.gain, k_norm.bias, k_norm.blend, k_eps, cos, sin)
    return parts, (q_norm.kind, k_norm.kind, [q_number, k_number], [q_norm.p, k_norm.p], interleaved)


def _structured(parts: Any, settings: Any) -> Ends:
    """What `flatten` flattened."""
    q_kind, k_kind, eps, p, interleaved = settings
    q_gain, q_bias, q_blend, q_eps, k_gain, k_bias, k_blend, k_eps, cos, sin = parts
    q_norm = Norm(q_kind, q_gain, q_bias, q_blend, eps[0] if q_eps is None else q_eps, p[0])
    k_norm = Norm(k_kind, k_gain, k_bias, k_blend, eps[1] if k_eps is None else k_eps, p[1])
    return q_norm, k_norm, None if cos is None else Rotary(cos, sin, interleaved)


class _Call(NamedTuple):
    """The arguments of fused attention after q, k and v."""

    parts: Any
    visible: Any
    settings: Any
    options: Any

    @property
    def ends(self) -> Ends:
        return _structured(self.parts, self.settings)

    @classmethod
    def of(cls, arguments: Any) -> _Call:
        visible, settings = N_PARTS, N_PARTS + N_VISIBLE
        options = settings + N_SETTINGS
        return cls(arguments[:visible], arguments[visible:settings], arguments[settings:options], arguments[options:])

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise ValueError unless the arguments fit."""
        check_attention(q, k, v, self.ends, self.visible, Options(*self.options))


@torch.library.impl("hf_qknorm::fused_attention", "default")
def _attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from hf_qknorm.ops.triton import attention

    call, statistics = _Call.of(rest[:-1]), rest[-1]
    call.check(q, k, v)
    heads = Heads(q, k, v, *call.ends)
    result = attention.forward(heads, Visible.of(q, *call.visible), Options(*call.options), statistics)
    largest, entropy = (result.normaliser.new_empty(0) if x is None else x for x in (result.largest, result.entropy))
    return result.out, result.normaliser, largest, entropy


@torch.library.register_fake("hf_qknorm::fused_attention")
def _(q, k, v, *rest):  # type: ignore[no-untyped-def]
    _Call.of(rest[:-1]).check(q, k, v)
    normaliser = q.new_empty((*q.shape[:3], 2), dtype=torch.float32)
    largest, entropy = (normaliser.new_empty(q.shape[:3] if rest[-1] else 0) for _ in range(2))
    return laid_out(q), normaliser, largest, entropy


@torch.library.impl("hf_qknorm::fused_attention_backward", "default")
def _attend_backward(
    grad: Tensor, out: Tensor, normaliser: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> list[Tensor]:
    from hf_qknorm.ops.triton import attention

    call = _Call.of(rest)
    call.check(q, k, v)
    check_gradients(q, grad, out, normaliser)
    heads, visible = Heads(q, k, v, *call.ends), Visible.of(q, *call.visible)
    found = attention.backward(grad, heads, visible, Options(*call.options), out, normaliser.contiguous())
    return [q.new_empty(0) if x is None else x for x in found]


@torch.library.register_fake("hf_qknorm::fused_attention_backward")
def _(grad, out, normaliser, q, k, v, *rest):  # type: ignore[no-untyped-def]
    call = _Call.of(rest)
    call.check(q, k, v)
    check_gradients(q, grad, out, normaliser)
    sinks = call.visible[1]
    found = [*_parameters(q, call.parts, call.settings), q.new_empty(0) if sinks is None else torch.empty_like(sinks)]
    return [laid_out(q), laid_out(k), laid_out(v), *found]


def _parameters(q: Tensor, parts: Any, settings: Any) -> list[Tensor]:
    """Empty gradients of the gains and biases of q and k; `[0]` where there is none."""
    kinds = (settings[0], settings[0], settings[1], settings[1])
    values = (parts[0], parts[1], parts[4], parts[5])
    return [
        q.new_empty(0) if x is None or kind == "none" else x.new_empty(x.shape)
        for x, kind in zip(values, kinds, strict=True)
    ]


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, *rest = inputs
    call = _Call.of(rest[:-1])
    ctx.call = call._replace(parts=None, visible=None)
    ctx.save_for_backward(q, k, v, *call.parts, *call.visible, output[0], output[1])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx, grad, *unused):  # type: ignore[no-untyped-def]
    q, k, v, *tensors, out, normaliser = ctx.saved_tensors
    found = OPERATORS.fused_attention_backward(
        grad, out, normaliser, q, k, v, *tensors, *ctx.call.settings, *ctx.call.options
    )
    dq, dk, dv, q_gain, q_bias, k_gain, k_bias, sinks = (x if x.numel() else None for x in found)
    numbers = [None] * (len(ctx.call.settings) + len(ctx.call.options) + 1)
    of_norms = (q_gain, q_bias, None, None, k_gain, k_bias, None, None)
    return dq, dk, dv, *of_norms, None, None, None, sinks, None, *numbers


def _refuse_second(ctx, *grads):  # type: ignore[no-untyped-def]
    raise NotImplementedError(
        'hf_qknorm attention has no second derivative: for double backward use attn_implementation="hf_qknorm_eager"'
    )


@torch.library.impl("hf_qknorm::norm_rope", "default")
def _norm_rope(q: Tensor, k: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    from hf_qknorm.ops.triton import norm_rope

    ends = _structured(rest[:N_PARTS], rest[N_PARTS:])
    check_norm_rope(q, k, ends)
    made = norm_rope.forward(q, k, *ends)
    return made.q, q.new_empty(0) if made.k is None else made.k


@torch.library.register_fake("hf_qknorm::norm_rope")
def _(q, k, *rest):  # type: ignore[no-untyped-def]
    check_norm_rope(q, k, _structured(rest[:N_PARTS], rest[N_PARTS:]))
    return q.new_empty(q.shape), q.new_empty(0 if k is None else k.shape)


@torch.library.impl("hf_qknorm::norm_rope_into", "default")
def _norm_rope_into(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor, *rest: Any
) -> Tensor:
    from hf_qknorm.ops.triton import norm_rope

    ends = _structured(rest[:N_PARTS], rest[N_PARTS:])
    check_norm_rope(q, k, ends)
    check_cache(k, v, keys, values, positions)
    check_positions(positions, keys.shape[2])
    return norm_rope.forward(q, k, *ends, cache=norm_rope.Cache(keys, values, v, positions.contiguous())).q


@torch.library.register_fake("hf_qknorm::norm_rope_into")
def _(q, k, v, keys, values, positions, *rest):  # type: ignore[no-untyped-def]
    check_norm_rope(q, k, _structured(rest[:N_PARTS], rest[N_PARTS:]))
    check_cache(k, v, keys, values, positions)
    return q.new_empty(q.shape)


@torch.library.impl("hf_qknorm::norm_rope_backward", "default")
def _norm_rope_backward(dq: Tensor, dk: Tensor | None, q: Tensor, k: Tensor | None, *rest: Any) -> list[Tensor]:
    from hf_qknorm.ops.triton import norm_rope

    ends = _structured(rest[:N_PARTS], rest[N_PARTS:])
    check_norm_rope(q, k, ends, *(x for x in (dq, dk) if x is not None))
    found = norm_rope.backward(dq, dk, q, k, *ends)
    return [q.new_empty(0) if x is None else x for x in found]


@torch.library.register_fake("hf_qknorm::norm_rope_backward")
def _(dq, dk, q, k, *rest):  # type: ignore[no-untyped-def]
    check_norm_rope(q, k, _structured(rest[:N_PARTS], rest[N_PARTS:]), *(x for x in (dq, dk) if x is not None))
    return [laid_out(q), q.new_empty(0) if k is None else laid_out(k), *_parameters(q, rest[:N_PARTS], rest[N_PARTS:])]


def _keep_heads(ctx, inputs, output):  # type: ignore[no-untyped-def]
    tensors, ctx.settings = inputs[: 2 + N_PARTS], inputs[2 + N_PARTS :]
    ctx.save_for_backward(*tensors)


def _differentiate_heads(ctx, dq, dk):  # type: ignore[no-untyped-def]
    dk = None if ctx.saved_tensors[1] is None else dk
    found = OPERATORS.norm_rope_backward(dq, dk, *ctx.saved_tensors, *ctx.settings)
    dq, dk, q_gain, q_bias, k_gain, k_bias = (x if x.numel() else None for x in found)
    of_norms = (q_gain, q_bias, None, None, k_gain, k_bias, None, None)
    return dq, dk, *of_norms, None, None, *([None] * N_SETTINGS)


torch.library.register_autograd("hf_qknorm::fused_attention", _differentiate, setup_context=_keep)
torch.library.register_autograd("hf_qknorm::fused_attention_backward", _refuse_second)
torch.library.register_autograd("hf_qknorm::norm_rope", _differentiate_heads, setup_context=_keep_heads)
torch.library.register_autograd("hf_qknorm::norm_rope_backward", _refuse_second)
