"""Operators of torch.library made from tables of fields: their schemas, calls and gradients go by field names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch._compile import _disable_dynamo  # torch.compiler.disable would import torch._dynamo, and so Triton

from hf_qknorm.ops.types import Heads, Norm, Options, Rotary, Visible

# The fields of an operator: the name of each argument, and its type in the schema.
HEADS = {"q": "Tensor", "k": "Tensor", "v": "Tensor"}
NORM = {
    "kind": "str",
    "gain": "Tensor?",
    "bias": "Tensor?",
    "blend": "Tensor?",
    "eps": "float",
    "stored_eps": "Tensor?",
    "p": "float",
}
NORM_ROPE = {
    **{f"{side}_{name}": kind for side in "qk" for name, kind in NORM.items()},
    **{"cos": "Tensor?", "sin": "Tensor?", "interleaved": "bool"},
}
VISIBLE = dict.fromkeys(Visible._fields, "Tensor?")
OPTIONS = {"scale": "float", "softcap": "float?", "causal": "bool", "window": "int?", "dropout": "float"}

Values = dict[str, Any]  # the arguments of an operator, by field


def flatten_norms(q_norm: Norm, k_norm: Norm, rotary: Rotary | None) -> Values:
    """The values of the fields `NORM_ROPE`."""
    values: Values = {}
    for side, norm in (("q", q_norm), ("k", k_norm)):
        stored_eps, eps = norm.eps_parts
        parts = (norm.kind, norm.gain, norm.bias, norm.blend, eps, stored_eps, norm.p)
        values.update(zip((f"{side}_{name}" for name in NORM), parts, strict=True))
    cos, sin, interleaved = (None, None, False) if rotary is None else rotary
    return {**values, "cos": cos, "sin": sin, "interleaved": interleaved}


def flatten(heads: Heads, visible: Visible, options: Options) -> Values:
    """The values of the fields of an attention operator."""
    values = {"q": heads.q, "k": heads.k, "v": heads.v, **flatten_norms(*heads[3:])}
    values.update(zip(Visible._fields, visible, strict=True))
    values.update(zip(Options._fields, options, strict=True))
    return values


def norms_of(values: Values) -> tuple[Norm, Norm, Rotary | None]:
    """The norms and the rotation that `flatten_norms` flattened; none for an operator without their fields."""
    if "cos" not in values:
        return Norm(), Norm(), None
    norms = []
    for side in "qk":
        kind, gain, bias, blend, eps, stored_eps, p = (values[f"{side}_{name}"] for name in NORM)
        norms.append(Norm(kind, gain, bias, blend, eps if stored_eps is None else stored_eps, p))
    cos, sin, interleaved = (values[name] for name in Rotary._fields)
    return norms[0], norms[1], None if cos is None else Rotary(cos, sin, interleaved)


def call_of(values: Values) -> tuple[Heads, Visible, Options]:
    """The call that `flatten` flattened."""
    heads = Heads(values["q"], values["k"], values["v"], *norms_of(values))
    return heads, Visible(*(values[name] for name in VISIBLE)), Options(*(values[name] for name in OPTIONS))


class Operator:
    """The operator `hf_qknorm::name` of these fields.

    Implementation and fake take the values by field, after `check`, which raises ValueError for those that do not fit.
    """

    def __init__(self, name: str, fields: dict[str, str], returns: str, check: Callable[[Values], None]) -> None:
        self.fields, self.check = tuple(fields), check
        self.tensors = tuple(field for field, kind in fields.items() if kind.startswith("Tensor"))
        self.qualified = f"hf_qknorm::{name}"
        schema = ", ".join(f"{kind} {field}" for field, kind in fields.items())
        torch.library.define(self.qualified, f"({schema}) -> {returns}")
        self.overload = getattr(torch.ops.hf_qknorm, name).default

    def __call__(self, values: Values) -> Any:
        return self.overload(*self.arguments(values))

    def arguments(self, values: Values) -> tuple[Any, ...]:
        """The values in the schema's order, without those of other fields."""
        return tuple([values[field] for field in self.fields])

    def named(self, arguments: Iterable[Any]) -> Values:
        """The arguments by field."""
        return dict(zip(self.fields, arguments, strict=True))

    def implement(self, function: Callable[[Values], Any]) -> None:
        """Register the implementation, for every device."""
        torch.library.impl(self.qualified, "default")(_disable_dynamo(self._checked(function)))

    def fake(self, function: Callable[[Values], Any]) -> None:
        """Register the function that makes results without numbers in them."""
        torch.library.register_fake(self.qualified)(self._checked(function))

    def _checked(self, function: Callable[[Values], Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            values = self.named(arguments)
            self.check(values)
            return function(values)

        return run


def differentiate(forward: Operator, backward: Operator, results: tuple[str, ...], gradients: tuple[str, ...]) -> None:
    """Register `backward` as the derivative of `forward`, and refuse a second derivative.

    Its fields are the gradients of the results that have one, then those of `results`, then the fields of `forward`.
    `results` names the first results of `forward`: only the first has a gradient; without names all have. `backward`
    returns the gradients of the fields `gradients`, `[0]` for None.
    """
    others = [field for field in forward.fields if field not in forward.tensors]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        values = forward.named(inputs)
        ctx.numbers = [values[field] for field in others]
        ctx.save_for_backward(*(values[field] for field in forward.tensors), *output[: len(results)])
        if results:
            ctx.mark_non_differentiable(*output[1:])

    def derive(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        values = dict(zip((*forward.tensors, *results), ctx.saved_tensors, strict=True))
        values.update(zip(others, ctx.numbers, strict=True))
        values.update(zip(backward.fields, grads if not results else grads[:1], strict=False))
        found = dict(zip(gradients, backward(values), strict=True))
        given = {field: x for field, x in found.items() if values[field] is not None and x.shape == values[field].shape}
        return tuple(given.get(field) for field in forward.fields)

    torch.library.register_autograd(forward.qualified, derive, setup_context=keep)
    torch.library.register_autograd(backward.qualified, _refuse_second_derivative)


def _refuse_second_derivative(ctx: Any, *grads: Any) -> NoReturn:
    raise NotImplementedError(
        'hf_qknorm attention has no second derivative: for double backward use attn_implementation="hf_qknorm_eager"'
    )
