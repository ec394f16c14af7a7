"""Repeat the launches of an earlier call, for calls that take longer on the host than on the device.

Checks, settings, tiles and arguments depend on the shapes of a call's tensors and not on their numbers. So the second
call of a signature is recorded: its launches, and torch's operators between them. Later calls of the same signature
repeat these and do nothing else. A call that reads a number on the host is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from types import FunctionType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_qknorm.ops.registration import Operator, Values
from hf_qknorm.ops.triton import gluon
from hf_qknorm.ops.triton.arguments import HeadArguments
from hf_qknorm.ops.triton.launch import Launch, on, pointers, precision, reach, recorded

MOST_PLANS: Final = 256  # signatures of an operator, after which it starts anew
ALLOCATIONS: Final = (
    torch.ops.aten.empty,
    torch.ops.aten.new_empty,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty_strided,
)
SAME: Final = (torch.ops.aten.detach, torch.ops.aten.alias)  # the argument itself, without gradients
_SEEN: Final = "seen once"
_NEVER: Final = "not to be repeated"

Plan = Callable[[list[Tensor]], Any]  # takes a call's arguments, and returns its results


class Growing(NamedTuple):
    """Keys and values whose number may differ between calls of a plan: the names of their fields, and their splits."""

    keys: str
    values: str
    splits: int


class Repeated:
    """The work of an operator, which repeats its launches for values of a signature that it knows.

    `growing` returns a call's keys if one plan serves any number of them, or None.
    """

    def __init__(self, operator: Operator, growing: Callable[[Values], Growing | None] | None = None) -> None:
        self.run, self.growing = operator.run, growing
        self.tensors = operator.tensors
        self.others = itemgetter(*[field for field in operator.fields if field not in operator.tensors])
        self.plans: dict[tuple[Any, ...], Any] = {}

    def __call__(self, values: Values, formed: Any = None) -> Any:
        growing = None if self.growing is None else self.growing(values)
        key, tensors = self.signature(values, growing)
        plan = self.plans.get(key)
        if type(plan) is FunctionType:
            with on(tensors[0].device):
                return plan(tensors)
        if plan is None:
            if len(self.plans) >= MOST_PLANS:
                self.plans.clear()
            self.plans[key] = _SEEN
        if plan is not _SEEN:
            return self.run(values, formed)
        recorder = _Recorder(values, tensors, growing)
        with recorded(recorder.steps), recorder:
            result = self.run(values, formed)
        self.plans[key] = recorder.plan(result)
        return result

    def signature(self, values: Values, growing: Growing | None = None) -> tuple[tuple[Any, ...], list[Tensor]]:
        """The key of a plan: a call's properties, with addresses to 16 bytes; and the call's tensors."""
        parts: list[Any] = [precision(values["q"].dtype), gluon.switched_on(), growing, self.others(values)]
        tensors = []
        for name in self.tensors:
            x = values[name]
            if x is None:
                parts.append(None)
                continue
            shape = (x.shape, x.stride()) if growing is None or name not in growing[:2] else _without_length(x)
            parts.append((shape, x.dtype, x.device, x.data_ptr() % 16))
            tensors.append(x)
        return tuple(parts), tensors


def _without_length(x: Tensor) -> tuple[Any, ...]:
    """The shape of keys `[B, Hk, S, D]` without S, and what kernels are compiled for of strides that depend on it."""
    (batch, heads, length, columns), strides = x.shape, x.stride()
    return batch, heads, length > 1, columns, *[(s % 16, s > 0, s == 1, s < 2**31) for s in strides]


class _UnrepeatableError(Exception):
    """A call depends on more than its signature."""


class _Call(NamedTuple):
    """A call of an operator of torch, and its result."""

    operator: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    result: Any


class _Recorder(TorchDispatchMode):
    """Records torch's operators inside, and numbers the tensors of the call; others add launches to `steps`.

    The steps keep all tensors alive, so that no two have one identity.
    """

    def __init__(self, values: Values, tensors: list[Tensor], growing: Growing | None) -> None:
        super().__init__()
        self.values, self.growing = values, growing
        self.numbers = {id(x): number for number, x in enumerate(tensors)}
        self.given = self.count = len(tensors)
        self.steps: list[Any] = []
        self.repeatable = len(self.numbers) == len(tensors)  # else: which of two tensors is meant?

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.steps.append(_Call(func, args, kwargs or {}, result))
        made = _tensors(result)
        if func.overloadpacket in SAME and id(args[0]) in self.numbers:
            self.numbers[id(result)] = self.numbers[id(args[0])]
        for x in made:
            if id(x) not in self.numbers:
                self.numbers[id(x)] = self.count
                self.count += 1
        self.repeatable &= bool(made)  # else a number came to the host
        return result

    def plan(self, result: Any) -> Any:
        """The plan of what was recorded, or `_NEVER` where it does not suffice to repeat the call."""
        if not self.repeatable:
            return _NEVER
        try:
            return _Writer(self).plan(result)
        except _UnrepeatableError:
            return _NEVER

    def needed(self, result: Any) -> list[Any]:
        """The steps without operators whose results nothing uses, or whose results are their arguments."""
        used, needed = self._places(result), []
        for step in reversed(self.steps):
            if isinstance(step, Launch):
                used |= self._places([*step.arguments.values()])
            elif step.operator.overloadpacket in SAME:
                continue
            elif step.operator._schema.is_mutable or used & self._places(step.result):
                used |= self._places([step.arguments, *step.options.values()])
            else:
                continue
            needed.append(step)
        return needed[::-1]

    def _places(self, x: Any) -> set[int | None]:
        return {self.numbers.get(id(tensor)) for tensor in _tensors(x)}


class _Writer:
    """Writes the function of a plan as source code. What does not change between calls is a constant.

    A list of steps to interpret takes the host longer than the launches.
    """

    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder
        self.names: Values = {"empty": torch.empty_strided, "make": tuple.__new__, "tensors": _tensors}
        self.names |= {"pointers": pointers, "reach": reach, "descriptor": _descriptor}

    def plan(self, result: Any) -> Plan:
        """The function that takes the steps for a call's tensors, and returns its result, in the form of `result`."""
        given = ", ".join(map("t{}".format, range(self.recorder.given)))
        steps = [self._launch(x) if isinstance(x, Launch) else self._call(x) for x in self.recorder.needed(result)]
        lines = [f"[{given}] = arguments", *self._keys(), *steps, f"return {self._write(result)}"]
        exec("\n    ".join(["def plan(arguments):", *lines]), self.names)
        plan: Plan = self.names["plan"]
        return plan

    def _keys(self) -> list[str]:
        """Lines for keys of any number: this number, and the arguments of kernels for keys and values."""
        growing = self.recorder.growing
        if growing is None:
            return []
        keys, values = (self._write(self.recorder.values[field]) for field in (growing.keys, growing.values))
        return [f"count = {keys}.shape[2]", f"keys = pointers({keys})", f"values = pointers({values})"]

    def _launch(self, launch: Launch) -> str:
        arguments = ", ".join(self._argument(*x) for x in launch.arguments.items())
        return f"{self._constant(launch.started[launch.grid])}({arguments})"

    def _argument(self, name: str, argument: Any) -> str:
        """An argument of a kernel. In a plan for any number of keys, some depend on it."""
        values, growing = self.recorder.values, self.recorder.growing
        if growing is None:
            return self._write(argument)
        for given, field in (("keys", growing.keys), ("values", growing.values)):
            if isinstance(argument, HeadArguments) and argument.data is values[field]:
                return given
        if name in ("K", "V"):  # a copy
            return f"pointers({self._write(argument.data)})"
        if name in ("keys", "room"):
            return "count"
        if name == "window":
            return f"reach({values['window']}, {values['q'].shape[2]}, count)"
        return self._write(argument)

    def _call(self, call: _Call) -> str:
        """Allocate memory, or call an operator of torch."""
        operator, arguments, options, result = call
        if operator.overloadpacket in ALLOCATIONS:
            size = f"{self._constant(result.shape)}, {self._constant(result.stride())}"
            kind = f"dtype={self._constant(result.dtype)}, device={self._constant(result.device)}"
            return f"{self._write(result)} = empty({size}, {kind})"
        named = (f"{name}={self._write(x)}" for name, x in options.items())
        made = "".join(f"{self._write(x)}, " for x in _tensors(result))
        written = ", ".join((*map(self._write, arguments), *named))
        return f"[{made}] = tensors({self._constant(operator)}({written}))"

    def _write(self, x: Any) -> str:
        """An expression for x."""
        if isinstance(x, Tensor):
            if id(x) not in self.recorder.numbers:
                raise _UnrepeatableError
            return f"t{self.recorder.numbers[id(x)]}"
        if not _tensors(x):
            return self._constant(x)
        if _is_descriptor(x):
            fields = self._constant(vars(x) | {"base": None})
            return f"descriptor({self._constant(type(x))}, {fields}, {self._write(x.base)})"
        parts = "".join(f"{self._write(part)}, " for part in x)
        if isinstance(x, list):
            return f"[{parts}]"
        return f"({parts})" if type(x) is tuple else f"make({self._constant(type(x))}, ({parts}))"

    def _constant(self, x: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = x
        return name


def _descriptor(kind: type, fields: dict[str, Any], base: Tensor) -> Any:
    """A tensor descriptor of another tensor of the same signature, without the checks of its class."""
    made: Any = object.__new__(kind)
    vars(made).update(fields, base=base)
    return made


def _is_descriptor(x: Any) -> bool:
    """Whether x is a tensor descriptor, of Triton or of Gluon."""
    return not isinstance(x, Tensor) and isinstance(getattr(x, "base", None), Tensor)


def _tensors(x: Any) -> list[Tensor]:
    """The tensors in an argument or a result."""
    if isinstance(x, Tensor):
        return [x]
    if _is_descriptor(x):
        return [x.base]
    return [tensor for part in x for tensor in _tensors(part)] if isinstance(x, (tuple, list)) else []
