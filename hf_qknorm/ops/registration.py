"""Operators of torch.library made from tables of fields: their schemas, calls and gradients go by field names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from types import NoneType
from typing import Any, Final, NamedTuple, NoReturn

import torch
from torch import _C, Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable would import torch._dynamo, and so Triton

from hf_qknorm.ops._ops import add_op_namespace_prefix, ops
from hf_qknorm.ops.checks import refuse_forward_mode
from hf_qknorm.ops.types import Heads, Norm, Options, Rotary, Visible

# The fields of an operator: the name of each argument, and its type in the schema.
HEADS = {"q": "Tensor", "k": "Tensor", "v": "Tensor"}
NORM = {
    **{"kind": "str", "gain": "Tensor?", "bias": "Tensor?", "blend": "Tensor?"},
    **{"stored_eps": "Tensor?", "eps": "float", "p": "float", "sharpness": "int"},
}
NORM_ROPE = {
    **{f"{side}_{name}": kind for side in "qk" for name, kind in NORM.items()},
    **{"cos": "Tensor?", "sin": "Tensor?", "interleaved": "bool"},
}
VISIBLE = dict.fromkeys(Visible._fields, "Tensor?")
OPTIONS = {"scale": "float", "softcap": "float?", "causal": "bool", "window": "int?", "dropout": "float"}
CALL = (*HEADS, *VISIBLE, *OPTIONS)
NO_ROTARY = None, None, False
_FLAT = (*NORM_ROPE, *CALL)

Values = dict[str, Any]  # the arguments of an operator, by field


def flatten_norms(q_norm: Norm, k_norm: Norm, rotary: Rotary | None) -> Values:
    """The values of the fields `NORM_ROPE`."""
    return dict(zip(NORM_ROPE, (*_norm_parts(q_norm), *_norm_parts(k_norm), *(rotary or NO_ROTARY)), strict=True))


def _norm_parts(norm: Norm) -> tuple[Any, ...]:
    kind, gain, bias, blend, eps, p, sharpness = norm
    if isinstance(eps, Tensor):
        return kind, gain, bias, blend, eps, 0.0, p, sharpness
    return kind, gain, bias, blend, None, eps, p, sharpness


def flatten(heads: Heads, visible: Visible, options: Options) -> Values:
    """The values of the fields of an attention operator."""
    q, k, v, q_norm, k_norm, rotary = heads
    norms = (*_norm_parts(q_norm), *_norm_parts(k_norm), *(rotary or NO_ROTARY))
    return dict(zip(_FLAT, (*norms, q, k, v, *visible, *options), strict=True))


_norm_rope_parts, _call_parts = itemgetter(*NORM_ROPE), itemgetter(*CALL)


def norms_of(values: Values) -> tuple[Norm, Norm, Rotary | None]:
    """The norms and the rotation that `flatten_norms` flattened; none for an operator without their fields."""
    if "cos" not in values:
        return Norm(), Norm(), None
    *parts, cos, sin, interleaved = _norm_rope_parts(values)
    rotary = None if cos is sin is None else Rotary(cos, sin, interleaved)
    return _norm(*parts[: len(NORM)]), _norm(*parts[len(NORM) :]), rotary


def _norm(
    kind: str, gain: Any, bias: Any, blend: Any, stored_eps: Tensor | None, eps: float, p: float, sharpness: int
) -> Norm:
    return Norm(kind, gain, bias, blend, eps if stored_eps is None else stored_eps, p, sharpness)


def call_of(values: Values) -> tuple[Heads, Visible, Options]:
    """The call that `flatten` flattened."""
    q, k, v, *rest = _call_parts(values)
    return Heads(q, k, v, *norms_of(values)), Visible(*rest[: len(VISIBLE)]), Options(*rest[len(VISIBLE) :])


PLAIN: Final = frozenset((Tensor, nn.Parameter, int, float, bool, str, NoneType))  # types of arguments


def is_plain(arguments: tuple[Any, ...]) -> bool:
    """Whether a call needs neither a gradient nor torch's dispatcher."""
    return not (needs_dispatcher(arguments) or needs_gradient(arguments))


def needs_gradient(arguments: tuple[Any, ...]) -> bool:
    """Whether autograd records a call of these arguments."""
    return _C.is_grad_enabled() and _C._any_requires_grad(*arguments)


def needs_dispatcher(arguments: tuple[Any, ...]) -> bool:
    """Whether an intercepted call, or a mode of functions such as a default device, needs torch's slow dispatcher."""
    return _C._len_torch_function_stack() > 0 or is_intercepted(arguments)


def is_intercepted(arguments: tuple[Any, ...]) -> bool:
    """Whether something else than a kernel gets a call from the dispatcher.

    It does for graphs, modes, forward mode, transforms of functions, subclasses of tensors, and tensors without memory.
    """
    return (
        torch.compiler.is_compiling()
        or torch.autograd.forward_ad._current_level >= 0
        or _C._len_torch_dispatch_stack() > 0
        or _C._functorch.peek_interpreter_stack() is not None
        or _C._get_tracing_state() is not None
        or not PLAIN.issuperset(map(type, arguments))
        or arguments[0].is_meta
    )


class Form(NamedTuple):
    """How an implementation takes fields of an operator: `of` makes its positional arguments from their values."""

    fields: frozenset[str]
    of: Callable[[Values], tuple[Any, ...]]


AS_CALL: Final = Form(frozenset(_FLAT), call_of)
AS_NORMS: Final = Form(frozenset(NORM_ROPE), norms_of)


class Operator:
    """The operator `name` of these fields, in the namespace of `_ops`.

    Implementation, fake and `check` take the values of `form`'s fields in its form, and each other field by name.
    `check` raises ValueError for arguments that do not fit. Each None among an implementation's results becomes an
    empty tensor `[0]` in torch's dispatcher: a schema has no optional results.

    `run` checks the arguments and calls the implementation. `direct` does the same for plain tensors, in less of the
    host's time where a module replaces it. `check_numbers` runs before either, and may read tensors.
    """

    run: Callable[..., Any]  # takes the values, and, where the caller has them, the arguments in the operator's form
    direct: Callable[..., Any]

    def __init__(self, name: str, fields: dict[str, str], returns: str, form: Form, check: Callable[..., None]) -> None:
        self.name, self.fields, self.form, self.check = add_op_namespace_prefix(name), fields, form, check
        self.tensors = [field for field, kind in fields.items() if kind.startswith("Tensor")]
        self.others = [field for field in fields if field not in form.fields]
        self.sequence: type = list if returns == "Tensor[]" else tuple
        self.derive: Derivative | None = None
        self.check_numbers: Callable[[Values], None] = lambda values: None
        schema = ", ".join(f"{kind} {field}" for field, kind in fields.items())
        torch.library.define(self.name, f"({schema}) -> {returns}")
        self.overload = getattr(ops, name).default

    def __call__(self, values: Values, formed: tuple[Any, ...] | None = None) -> Any:
        """Call the operator with the values by field; `formed` are the same in its form, if the caller has them.

        Raises NotImplementedError for a tensor that carries a tangent, and in `torch.func.grad`, `vjp` and `jacrev`.
        """
        arguments = self.arguments(values)
        refuse_forward_mode(arguments)
        if needs_dispatcher(arguments):
            _refuse_functional_gradients(arguments)
            return self.overload(*arguments)
        if not needs_gradient(arguments):
            self.check_numbers(values)
            return self.direct(values, formed)
        if self.derive is None:
            return self.overload(*arguments)
        tensors = map(values.__getitem__, self.tensors)
        return _Differentiable.apply(self, values, formed, *tensors)  # type: ignore[no-untyped-call]

    def arguments(self, values: Values) -> tuple[Any, ...]:
        """The values in the schema's order, without the values of other fields."""
        return tuple(map(values.__getitem__, self.fields))

    def named(self, arguments: Iterable[Any]) -> Values:
        """The arguments by field."""
        return dict(zip(self.fields, arguments, strict=True))

    def implement(self, function: Callable[..., Any]) -> None:
        """Register the implementation, for every device."""

        def dispatched(*arguments: Any) -> Any:
            values = self.named(arguments)
            self.check_numbers(values)
            return self._filled(values, (self.run if is_intercepted(arguments) else self.direct)(values))

        self.run = self.direct = self._checked(function)
        torch.library.impl(self.name, "default")(_disable_dynamo(dispatched))

    def fake(self, function: Callable[..., Any]) -> None:
        """Register the function that makes results of the right shapes, without their numbers."""
        run = self._checked(function)

        def faked(*arguments: Any) -> Any:
            values = self.named(arguments)
            return self._filled(values, run(values))

        torch.library.register_fake(self.name)(faked)

    def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(values: Values, formed: tuple[Any, ...] | None = None) -> Any:
            formed = self.form.of(values) if formed is None else formed
            others = {field: values[field] for field in self.others}
            self.check(*formed, **others)
            return function(*formed, **others)

        return run

    def _filled(self, values: Values, results: Any) -> Any:
        """The results with an empty tensor for each None."""
        if isinstance(results, Tensor):
            return results
        return self.sequence([values["q"].new_empty(0) if x is None else x for x in results])

    def derivative(self, upstream: tuple[str, ...], kept: tuple[str, ...], gradients: tuple[str, ...]) -> Operator:
        """Define the operator `name_backward` and register it as the derivative, without a second derivative.

        Its fields are `upstream`, the gradients of this operator's results; `kept`, the first of these results; then
        this operator's fields. It returns the gradients of the fields `gradients`. If it keeps results, only the first
        one is differentiable; else all are.
        """
        own = dict.fromkeys((*upstream, *kept), "Tensor")
        backward = Operator(
            f"{self.name.partition('::')[2]}_backward", own | self.fields, "Tensor[]", self.form, self.check
        )
        self.derive = Derivative(self, backward, upstream, kept, gradients)
        derive = self.derive

        def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
            derive.keep(ctx, self.named(inputs), output)

        def differentiate(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            found = derive(ctx, grads)
            return tuple([found.get(field) for field in self.fields])

        torch.library.register_autograd(self.name, differentiate, setup_context=keep)
        torch.library.register_autograd(backward.name, _refuse_second_derivative)
        return backward


class Derivative(NamedTuple):
    """The derivative of `operator` by the operator `backward`; its fields are explained in `Operator.derivative`."""

    operator: Operator
    backward: Operator
    upstream: tuple[str, ...]
    kept: tuple[str, ...]
    gradients: tuple[str, ...]

    def keep(self, ctx: Any, values: Values, output: tuple[Any, ...]) -> None:
        """Save in autograd's `ctx` what the derivative needs."""
        ctx.numbers = {field: x for field, x in values.items() if field not in self.operator.tensors}
        ctx.save_for_backward(*(values[field] for field in self.operator.tensors), *output[: len(self.kept)])
        if self.kept:
            ctx.mark_non_differentiable(*(x for x in output[1:] if x is not None))
            ctx.set_materialize_grads(False)  # else zeros are made for results without a gradient

    def __call__(self, ctx: Any, grads: tuple[Any, ...]) -> Values:
        """The gradients by field."""
        if grads[0] is None:
            return {}
        values = ctx.numbers | dict(zip((*self.operator.tensors, *self.kept), ctx.saved_tensors, strict=True))
        values.update(zip(self.upstream, grads, strict=False))
        pairs = zip(self.gradients, self.backward(values), strict=True)
        return {field: x for field, x in pairs if x is not None and x.shape == getattr(values[field], "shape", None)}


class _Differentiable(torch.autograd.Function):
    """An operator's call with its derivative, as torch.library makes one, in a fraction of the host's time."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, values: Values, formed: Any, *tensors: Tensor | None) -> Any:
        assert operator.derive is not None
        operator.check_numbers(values)
        results = tuple(operator.direct(values, formed))
        operator.derive.keep(ctx, values, results)
        ctx.operator = operator
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        found = ctx.operator.derive(ctx, grads)
        return (None, None, None, *(found.get(field) for field in ctx.operator.tensors))


def _refuse_functional_gradients(arguments: tuple[Any, ...]) -> None:
    if torch.compiler.is_compiling() or not needs_gradient(arguments):
        return
    transforms = _C._functorch.get_interpreter_stack() or ()
    if any(transform.key() == _C._functorch.TransformType.Grad for transform in transforms):
        raise NotImplementedError(
            "hf_qknorm attention does not take torch.func.grad, vjp or jacrev: use loss.backward(), or eager "
            'attention, such as attn_implementation="hf_qknorm_eager"'
        )


def _refuse_second_derivative(ctx: Any, *grads: Any) -> NoReturn:
    raise NotImplementedError(
        "hf_qknorm attention has no second derivative: for double backward use eager attention, such as "
        'attn_implementation="hf_qknorm_eager"'
    )
