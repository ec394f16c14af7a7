"""Repeat the launches of an earlier call, for calls that take longer on the host than on the device.

Checks, settings, tiles and arguments depend on the shapes of a call's tensors and not on their numbers. So the second
call of a signature is recorded: its launches, and torch's operators between them. Later calls of the same signature
repeat these and do nothing else. A call that reads a number on the host is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_qknorm.ops.registration import Operator, Values
from hf_qknorm.ops.triton import gluon
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

Tensors = list[Any]  # of a call: its arguments, then what its steps make, None before
Step = Callable[[Tensors], None]
Fill = Callable[[Tensors], Any]  # makes an argument


class Plan(NamedTuple):
    """Steps, each of which may fill places of the call's tensors; `made` is the number of these."""

    steps: list[Step]
    made: int
    results: Fill

    def run(self, tensors: list[Tensor]) -> Any:
        """Take the steps, for a call with these arguments."""
        places: Tensors = [*tensors, *[None] * self.made]
        with on(tensors[0].device):
            for step in self.steps:
                step(places)
        return self.results(places)


class Repeated:
    """The work of an operator, which repeats its launches for values of a signature that it knows.

    For calls of which one plan serves many numbers of keys, `by_keys` gives the settings that depend on this number;
    for others None.
    """

    def __init__(self, operator: Operator, by_keys: Callable[[Values], tuple[Any, ...] | None] | None = None) -> None:
        self.run, self.by_keys = operator.run, by_keys
        self.tensors = operator.tensors
        self.others = itemgetter(*[field for field in operator.fields if field not in operator.tensors])
        self.plans: dict[tuple[Any, ...], Any] = {}

    def __call__(self, values: Values) -> Any:
        settings = None if self.by_keys is None else self.by_keys(values)
        key, tensors = self.signature(values, settings)
        plan = self.plans.get(key)
        if type(plan) is Plan:
            return plan.run(tensors)
        if plan is None:
            if len(self.plans) >= MOST_PLANS:
                self.plans.clear()
            self.plans[key] = _SEEN
        if plan is not _SEEN:
            return self.run(values)
        recorder = _Recorder(values, tensors, any_length=settings is not None)
        with recorded(recorder.steps), recorder:
            result = self.run(values)
        self.plans[key] = recorder.plan(result)
        return result

    def signature(
        self, values: Values, settings: tuple[Any, ...] | None = None
    ) -> tuple[tuple[Any, ...], list[Tensor]]:
        """All that the launches depend on, apart from addresses, which only matter to 16 bytes; and the tensors."""
        parts: list[Any] = [precision(values["q"].dtype), gluon.switched_on(), settings, self.others(values)]
        tensors = []
        for name in self.tensors:
            x = values[name]
            if x is None:
                parts.append(None)
                continue
            shape = (x.shape, x.stride()) if settings is None or name not in ("k", "v") else _without_length(x)
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

    def __init__(self, values: Values, tensors: list[Tensor], *, any_length: bool) -> None:
        super().__init__()
        self.values, self.any_length = values, any_length
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
            steps = [self._start(x) if isinstance(x, Launch) else self._do(x) for x in self._needed(result)]
            return Plan(steps, self.count - self.given, self._maker(result))
        except _UnrepeatableError:
            return _NEVER

    def _needed(self, result: Any) -> list[Any]:
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

    def _start(self, launch: Launch) -> Step:
        """The step that launches a kernel."""
        start = launch.started[launch.grid]
        template, fills = _open([*launch.arguments.values()], [self._argument(*x) for x in launch.arguments.items()])

        def step(tensors: Tensors) -> None:
            arguments = template.copy()
            for place, fill in fills:
                arguments[place] = fill(tensors)
            start(*arguments)

        return step

    def _argument(self, name: str, argument: Any) -> Fill | None:
        """Makes an argument of a kernel; None for a constant. In a plan for any number of keys, some depend on it."""
        if not self.any_length:
            return self._fill(argument)
        keys, queries, window = self.numbers[id(self.values["k"])], self.values["q"].shape[2], self.values["window"]
        if name in ("K", "V"):
            number = self.numbers[id(argument.data)]
            return lambda tensors: pointers(tensors[number])
        if name == "keys":
            return lambda tensors: tensors[keys].shape[2]
        if name == "window":
            return lambda tensors: reach(window, queries, tensors[keys].shape[2])
        return self._fill(argument)

    def _do(self, call: _Call) -> Step:
        """The step that allocates memory, or calls an operator of torch."""
        operator, _, options, result = call
        made, names = [self.numbers[id(x)] for x in _tensors(result)], [*options]
        if operator.overloadpacket in ALLOCATIONS:
            return partial(_allocate, made[0], result.shape, result.stride(), result.dtype, result.device)
        fill = self._maker((call.arguments, [*options.values()]))

        def step(tensors: Tensors) -> None:
            arguments, values = fill(tensors)
            found = operator(*arguments, **dict(zip(names, values, strict=True)))
            for number, x in zip(made, _tensors(found), strict=True):
                tensors[number] = x

        return step

    def _maker(self, x: Any) -> Fill:
        """Makes x from the tensors of a call."""
        return self._fill(x) or (lambda tensors: x)

    def _fill(self, x: Any) -> Fill | None:
        """Makes x from the tensors of a call; None for x without tensors."""
        if isinstance(x, Tensor):
            if id(x) not in self.numbers:
                raise _UnrepeatableError
            return itemgetter(self.numbers[id(x)])
        if _is_descriptor(x):
            return partial(_descriptor, type(x), vars(x) | {"base": None}, self.numbers[id(x.base)])
        if not isinstance(x, (tuple, list)):
            return None
        template, fills = _open([*x], [self._fill(part) for part in x])
        return partial(_sequence, type(x), template, fills) if fills else None


def _open(parts: list[Any], fills: list[Fill | None]) -> tuple[list[Any], list[tuple[int, Fill]]]:
    """The constant parts, None in the place of others, which a plan must not keep alive; and what makes these."""
    template = [part if fill is None else None for part, fill in zip(parts, fills, strict=True)]
    return template, [(place, fill) for place, fill in enumerate(fills) if fill is not None]


def _allocate(number: int, shape: Any, strides: Any, dtype: Any, device: Any, tensors: Tensors) -> None:
    tensors[number] = torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _sequence(kind: type, template: list[Any], fills: list[tuple[int, Fill]], tensors: Tensors) -> Any:
    """A list, tuple or named tuple like the template, with other tensors."""
    parts = template.copy()
    for place, fill in fills:
        parts[place] = fill(tensors)
    return parts if kind is list else tuple.__new__(kind, parts)


def _descriptor(kind: type, fields: dict[str, Any], number: int, tensors: Tensors) -> Any:
    """A tensor descriptor with another tensor of the same signature, without the checks of its class."""
    made: Any = object.__new__(kind)
    vars(made).update(fields, base=tensors[number])
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
