"""Repeat the launches of an earlier call, for calls that take longer on the host than on the device.

Checks, settings, tiles and arguments depend on the shapes of a call's tensors and not on their numbers. So the first
call of a signature is recorded: the memory that it allocates, and its launches. A call of the same signature allocates
and launches the same, and does nothing else. A call that does more, such as copying a tensor, is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.tools.tensor_descriptor import TensorDescriptor

from hf_qknorm.ops.triton.launch import Launch, on, precision, recorded

MOST_PLANS = 256  # signatures of an operator, after which it starts anew
ALLOCATIONS = (torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_strided)
Values = dict[str, Any]


class Slot(NamedTuple):
    """The place of a tensor: its number among the call's tensors, then its buffers."""

    number: int


class Group(NamedTuple):
    """A named tuple of `kind`, with slots in the place of tensors."""

    kind: type[tuple[Any, ...]]
    parts: list[Any]


class Buffer(NamedTuple):
    """Memory that a call allocates."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def allocate(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


class Plan(NamedTuple):
    """Launches, whose arguments have slots in the place of tensors; the last buffer is the result."""

    buffers: list[Buffer]
    launches: list[Launch]

    def run(self, tensors: list[Tensor]) -> Tensor:
        """Allocate and launch."""
        device = tensors[0].device
        with on(device):
            tensors = tensors + [buffer.allocate(device) for buffer in self.buffers]
            for started, grid, arguments in self.launches:
                started[grid](*[_filled(x, tensors) for x in arguments])
        return tensors[-1]


def _filled(argument: Any, tensors: list[Tensor]) -> Any:
    if type(argument) is Slot:
        return tensors[argument.number]
    if type(argument) is Group:
        kind, parts = argument
        return tuple.__new__(kind, [tensors[x.number] if type(x) is Slot else x for x in parts])
    return argument


@cache
def repeated(run: Callable[[Values], Tensor]) -> Callable[[Values], Tensor]:
    """`run`, an operator of one result, that repeats its launches for values of a signature that it knows."""
    plans: dict[tuple[Any, ...], Plan | None] = {}

    def call(values: Values) -> Tensor:
        tensors = [x for x in values.values() if isinstance(x, Tensor)]
        key = _signature(values)
        plan = plans.get(key)
        if plan is not None:
            return plan.run(tensors)
        if key in plans:
            return run(values)
        if len(plans) >= MOST_PLANS:
            plans.clear()
        with _Recorder() as recorder, recorded() as launches:
            result = run(values)
        plans[key] = recorder.plan(tensors, launches, result)
        return result

    return call


def _signature(values: Values) -> tuple[Any, ...]:
    """All that the launches depend on, apart from addresses; these only matter to 16 bytes."""
    parts = [
        (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) if isinstance(x, Tensor) else x
        for x in values.values()
    ]
    return (precision(values["q"].dtype), *parts)


class _Recorder(TorchDispatchMode):
    """Notes the memory that is allocated inside, by its address; `changed` if a tensor was written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[int, Buffer] = {}
        self.kept: list[Tensor] = []  # so that no address is used twice
        self.changed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.changed |= func._schema.is_mutable
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self.kept.append(x)
                if func.overloadpacket in ALLOCATIONS:
                    self.buffers[x.data_ptr()] = Buffer((*x.shape,), x.stride(), x.dtype)
        return result

    def plan(self, tensors: list[Tensor], launches: list[Launch], result: Tensor) -> Plan | None:
        """The plan of what was recorded, or None where it does not suffice to repeat the call."""
        places = {x.data_ptr(): (number, x.dtype) for number, x in enumerate(tensors)}
        made = self.buffers.pop(result.data_ptr(), None)
        if self.changed or made is None or len(places) < len(tensors):  # which of two tensors was meant?
            return None
        buffers = {**self.buffers, result.data_ptr(): Buffer((*result.shape,), result.stride(), result.dtype)}
        for number, (address, buffer) in enumerate(buffers.items(), len(tensors)):
            places[address] = number, buffer.dtype
        try:
            filled = [launch._replace(arguments=[_slots(x, places) for x in launch.arguments]) for launch in launches]
        except KeyError:
            return None
        return Plan([*buffers.values()], filled)


def _slots(argument: Any, places: dict[int, tuple[int, torch.dtype]]) -> Any:
    """The argument with slots for tensors. Raises KeyError for a computed tensor, and for a tensor descriptor."""
    if isinstance(argument, TensorDescriptor):
        raise KeyError(argument.base)
    if isinstance(argument, Tensor):
        number, dtype = places[argument.data_ptr()]
        if dtype != argument.dtype:
            raise KeyError(argument.dtype)
        return Slot(number)
    if isinstance(argument, tuple) and any(isinstance(x, Tensor) for x in argument):
        return Group(type(argument), [_slots(x, places) for x in argument])
    return argument
