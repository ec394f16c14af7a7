"""Operators of torch.library made from tables of fields: their schemas, calls and gradients go by field names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
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
    fields, parts = (*HEADS, *VISIBLE, *OPTIONS), (*heads[:3], *visible, *options)
    return {**flatten_norms(*heads[3:]), **dict(zip(fields, parts, strict=True))}


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

    Implementation and fake take the values by field, after `check`, which raises ValueError for values that do not fit.
    Each None that they return becomes an empty tensor `[0]`: a schema has no optional results.
    """

    def __init__(self, name: str, fields: dict[str, str], returns: str, check: Callable[[Values], None]) -> None:
        self.name, self.fields, self.check = f"hf_qknorm::{name}", fields, check
        self.sequence: type = list if returns == "Tensor[]" else tuple
        schema = ", ".join(f"{kind} {field}" for field, kind in fields.items())
        torch.library.define(self.name, f"({schema}) -> {returns}")
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
        torch.library.impl(self.name, "default")(_disable_dynamo(self._checked(function)))

    def fake(self, function: Callable[[Values], Any]) -> None:
        """Register the function that makes results of the right shapes, without their numbers."""
        torch.library.register_fake(self.name)(self._checked(function))

    def _checked(self, function: Callable[[Values], Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            values = self.named(arguments)
            self.check(values)
            results = function(values)
            if isinstance(results, Tensor):
                return results
            return self.sequence([values["q"].new_empty(0) if x is None else x for x in results])

        return run

    def derivative(self, upstream: tuple[str, ...], kept: tuple[str, ...], gradients: tuple[str, ...]) -> Operator:
        """Define the operator `name_backward` and register it as the derivative, without a second derivative.

        Its fields are `upstream`, the gradients of this operator's results; `kept`, the first of these results; then
        this operator's fields. It returns the gradients of the fields `gradients`. If it keeps results, only the first
        one is differentiable; else all are.
        """
        own = dict.fromkeys((*upstream, *kept), "Tensor")
        backward = Operator(f"{self.name.partition('::')[2]}_backward", own | self.fields, "Tensor[]", self.check)
        tensors = [field for field, kind in self.fields.items() if kind.startswith("Tensor")]
        others = [field for field in self.fields if field not in tensors]

        def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
            values = self.named(inputs)
            ctx.numbers = [values[field] for field in others]
            ctx.save_for_backward(*(values[field] for field in tensors), *output[: len(kept)])
            if kept:
                ctx.mark_non_differentiable(*output[1:])

        def differentiate(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            values = dict(zip((*tensors, *kept, *others), (*ctx.saved_tensors, *ctx.numbers), strict=True))
            values.update(zip(upstream, grads, strict=False))
            found = dict(zip(gradients, backward(values), strict=True))
            given = [field for field, x in found.items() if x.shape == getattr(values[field], "shape", None)]
            return tuple(found[field] if field in given else None for field in self.fields)

        torch.library.register_autograd(self.name, differentiate, setup_context=keep)
        torch.library.register_autograd(backward.name, _refuse_second_derivative)
        return backward


def _refuse_second_derivative(ctx: Any, *grads: Any) -> NoReturn:
    raise NotImplementedError(
        'hf_qknorm attention has no second derivative: for double backward use attn_implementation="hf_qknorm_eager"'
    )
