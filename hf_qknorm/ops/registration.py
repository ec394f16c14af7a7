"""Operators of torch.library over named tuples: a schema has one flat argument for each of their fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable would import torch._dynamo, and so Triton
from torch.autograd.function import once_differentiable

from hf_qknorm.ops.types import NO_ANGLES, Heads, Norm, Options, Rotary, Visible

# The fields of an operator: the name of each argument, and its type in the schema.
HEADS: Final = {"q": "Tensor", "k": "Tensor", "v": "Tensor"}
NORM: Final = {
    **{"kind": "str", "gain": "Tensor?", "bias": "Tensor?"},
    **{"eps": "float", "p": "float", "knee": "Tensor?"},
}
ROTARY: Final = {"cos": "Tensor?", "sin": "Tensor?", "interleaved": "bool"}
NORM_ROPE: Final = {f"{side}_{name}": kind for side in "qk" for name, kind in NORM.items()} | ROTARY
QUERIES_KEYS: Final = {"q": "Tensor", "k": "Tensor?"}
PARAMETERS: Final = ("q_gain", "q_bias", "k_gain", "k_bias")  # of the norms
VISIBLE: Final = dict.fromkeys(Visible._fields, "Tensor?")
OPTIONS: Final = {"scale": "float", "softcap": "float?", "causal": "bool", "window": "int?", "dropout": "float"}
CALL: Final = {**HEADS, **NORM_ROPE, **VISIBLE, **OPTIONS}

Flat = tuple[Any, ...]  # the arguments of an operator, in the schema's order


def pack_norms(q_norm: Norm, k_norm: Norm, rotary: Rotary | None) -> Flat:
    """The arguments `NORM_ROPE`."""
    return *q_norm, *k_norm, *(rotary or NO_ANGLES)


def pack(heads: Heads, visible: Visible, options: Options) -> Flat:
    """The arguments `CALL`."""
    return *heads[:3], *pack_norms(*heads[3:]), *visible, *options


def unpack_norms(packed: Flat) -> tuple[Norm, Norm, Rotary | None]:
    """The inverse of `pack_norms`."""
    *norms, cos, sin, interleaved = packed
    rotary = None if cos is sin is None else Rotary(cos, sin, interleaved)
    return Norm(*norms[: len(NORM)]), Norm(*norms[len(NORM) :]), rotary


def unpack(packed: Flat) -> tuple[Heads, Visible, Options]:
    """The inverse of `pack`."""
    seen = 3 + len(NORM_ROPE)
    visible, options = packed[seen : seen + len(VISIBLE)], packed[seen + len(VISIBLE) :]
    q, k, v = packed[:3]
    return Heads(q, k, v, *unpack_norms(packed[3:seen])), Visible(*visible), Options(*options)


class Operator:
    """The operator `name` of these fields; a call goes through torch's dispatcher. `differentiable` gives gradients.

    An implementation may return None for a tensor: the operator returns an empty one there, as a schema has no
    optional results.
    """

    def __init__(self, name: str, fields: dict[str, str], returns: str) -> None:
        self.name, self.fields, self.lists = f"hf_qknorm::{name}", fields, returns == "Tensor[]"
        schema = ", ".join(f"{kind} {field}" for field, kind in fields.items())
        torch.library.define(self.name, f"({schema}) -> {returns}")
        self.overload = getattr(torch.ops.hf_qknorm, name).default

    def __call__(self, *arguments: Any) -> Any:
        return self.overload(*arguments)

    def implement(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the implementation, for every device."""
        torch.library.impl(self.name, "default")(_disable_dynamo(self._filled(function)))
        return function

    def fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register the function that makes results of the right shapes, without their numbers."""
        torch.library.register_fake(self.name)(self._filled(function))
        return function

    def _filled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def filled(first: Tensor, *arguments: Any) -> Any:
            found = function(first, *arguments)
            if isinstance(found, Tensor):
                return found
            results = [first.new_empty(0) if x is None else x for x in found]
            return results if self.lists else tuple(results)

        return filled


def differentiable(
    fields: dict[str, str],
    gradients: Iterable[str],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    kept: int,
) -> Callable[..., Any]:
    """The function of the arguments `fields` that the operator `forward` computes, with the derivative `backward`.

    With `kept` it is the first result of `forward` alone. `backward` gets the gradients, the first `kept` results, and
    the arguments, and returns the gradients of the fields `gradients`. torch.library could register it too, but takes
    0.2 ms more a call of 30 arguments.
    """
    is_tensor = [kind.startswith("Tensor") for kind in fields.values()]
    tensors = [place for place, found in enumerate(is_tensor) if found]
    places = [[*fields].index(field) for field in gradients]

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            results = forward(*arguments)
            ctx.save_for_backward(*[arguments[place] for place in tensors], *(results[:kept] if kept else ()))
            ctx.others = [None if tensor else x for tensor, x in zip(is_tensor, arguments, strict=True)]
            return results[0] if kept else results

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Tensor) -> Flat:
            saved, arguments = ctx.saved_tensors, [*ctx.others]
            for place, x in zip(tensors, saved, strict=False):
                arguments[place] = x
            found: list[Any] = [None] * len(arguments)
            for place, x in zip(places, backward(*grads, *saved[len(tensors) :], *arguments), strict=True):
                if x is not None and arguments[place] is not None and x.shape == arguments[place].shape:
                    found[place] = x  # not an empty one for None
            return tuple(found)

    def apply(*arguments: Any) -> Any:
        run: Any = Differentiable.apply
        return run(*(_distinct(arguments) if torch.compiler.is_compiling() else arguments))

    return apply


def _distinct(arguments: Flat) -> list[Any]:
    """The arguments with a view in place of a tensor that is there before: a trace takes none of them twice."""
    found: list[Any] = []
    for x in arguments:
        found.append(x.view_as(x) if isinstance(x, Tensor) and any(x is y for y in found) else x)
    return found
