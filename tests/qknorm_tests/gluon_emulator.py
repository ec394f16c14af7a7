"""Gluon for Hopper on a CPU, as far as the package's kernel uses it: the same source, over this language."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from qknorm_tests import gluon_machine as machine
from qknorm_tests.gluon_machine import Barrier, Barriers, Partition, Shared, Value, elementwise

PACKAGE = "hf_qknorm.ops.triton"


class Slice(tuple[Any, ...]):
    """The layout of a row or column of tensors with the layout `parent`."""

    parent = property(lambda self: self[1])


def reduced(function: Callable[[Tensor, int], Tensor]) -> Callable[[Value, int], Value]:
    return lambda x, axis: Value(function(x.x, axis), Slice((axis, x.layout)))


class Pointer:
    """Addresses in a tensor."""

    def __init__(self, data: Tensor, at: Any = 0) -> None:
        self.data, self.at = data, at

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.data, self.at + offset)

    def load(self) -> Value:
        return Value(self.data.view(-1)[int(self.at)])

    def store(self, x: Value, mask: Value) -> None:
        self.data.view(-1)[self.at.x[mask.x]] = x.x[mask.x]


class Descriptor:
    """A tensor descriptor. Loads are zero outside of the tensor, and stores end there."""

    layout = "tiles"

    def __init__(self, data: Tensor, block: list[int]) -> None:
        self.data, self.block, self.dtype = data, block, data.dtype
        self.block_type = SimpleNamespace(nbytes=math.prod(block) * data.element_size())

    def spans(self, at: list[Any]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The parts of the tensor and of a tile that lie in each other."""
        inside, part = [], []
        for start, block, size in zip(map(int, at), self.block, self.data.shape, strict=True):
            first = max(start, 0)
            last = max(min(start + block, size), first)
            inside.append(slice(first, last))
            part.append(slice(first - start, last - start))
        return tuple(inside), tuple(part)


def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if layout == "barriers":
        return Barriers(Barrier() for _ in range(shape[0])) if len(shape) == 2 else Barrier()
    return Shared(torch.full(shape, math.nan, dtype=dtype))


def language() -> ModuleType:
    """The module `gl`, and `tl` of the functions that Triton's kernels share."""
    found = ModuleType("triton.language")
    vars(found).update(
        {name: getattr(torch, name) for name in ("float32", "int64", "int32", "int16")},
        constexpr=lambda x: x,
        static_range=range,
        program_id=lambda axis: Value(language.program),  # type: ignore[attr-defined]
        zeros=lambda shape, dtype, layout: Value(torch.zeros(shape, dtype=dtype), layout),
        arange=lambda start, stop, layout: Value(torch.arange(start, stop), layout),
        cdiv=lambda a, b: (a + b - 1) // b,
        maximum=elementwise(torch.maximum),
        minimum=elementwise(torch.minimum),
        where=elementwise(torch.where),
        exp2=elementwise(torch.exp2),
        abs=elementwise(torch.abs),
        floor=elementwise(torch.floor),
        sum=reduced(torch.sum),
        max=reduced(torch.amax),
        load=Pointer.load,
        store=Pointer.store,
        convert_layout=lambda x, layout: Value(x.x, layout),
        allocate_shared_memory=allocate,
        warp_specialize=machine.warp_specialize,
        SliceLayout=lambda axis, parent: Slice((axis, parent)),
        NVMMADistributedLayout=lambda *parts: ("scores or sums", *map(str, parts)),
        DotOperandLayout=lambda *parts: ("factor", *parts),
    )
    return found


def modules() -> dict[str, ModuleType]:
    """Triton's modules, over this language."""

    def jit(function: Any = None, **options: Any) -> Any:
        return function or (lambda function: function)

    gl = language()
    barriers = SimpleNamespace(
        MBarrierLayout=lambda: "barriers",
        init=Barrier.init,
        wait=Barrier.wait,
        arrive=Barrier.arrive,
        expect=lambda barrier, nbytes: barrier.arrive(1, nbytes),
    )
    copies = SimpleNamespace(
        async_load=machine.load_tile, async_store=machine.store_tile, store_wait=machine.store_wait
    )
    hopper = {"fence_async_shared": machine.fence, "mbarrier": barriers, "tma": copies}
    hopper |= {name: getattr(machine, name) for name in ("warpgroup_mma", "warpgroup_mma_wait")}
    found: dict[str, Any] = {"triton": {"jit": jit, "language": gl}, "triton.experimental": {}}
    found["triton.experimental.gluon"] = {"jit": jit, "language": gl}
    found["triton.experimental.gluon.language.nvidia"] = {}
    found["triton.experimental.gluon.language.nvidia.hopper"] = hopper
    made = {name: ModuleType(name) for name in found}
    for name, module in made.items():
        vars(module).update(found[name], __path__=[])
    return made | {"triton.language": gl, "triton.experimental.gluon.language": gl}


@contextmanager
def emulated() -> Iterator[None]:
    """Imports of Triton inside get this language, and the package's kernels are imported anew; all is put back."""
    package = sys.modules[PACKAGE]
    with mock.patch.dict(sys.modules, modules()), mock.patch.dict(vars(package)):
        for name in [name for name in sys.modules if name.startswith(f"{PACKAGE}.")]:
            del sys.modules[name]
        yield


def kernel(edit: Callable[[str], str] = str) -> Callable[..., None]:
    """The package's Gluon kernel over this language, from its source after an `edit`."""
    spec = find_spec(f"{PACKAGE}.gluon_forward")
    assert spec is not None
    module = ModuleType("gluon_forward")
    with emulated():
        exec(compile(edit(Path(str(spec.origin)).read_text()), str(spec.origin), "exec"), vars(module))
    found: Callable[..., None] = module.gluon_forward_kernel
    return found


def launch(function: Callable[..., None], grid: tuple[int], device: torch.device, **arguments: Any) -> None:
    """Replaces `launch.launch`: runs one program after the other."""
    given = {name: _argument(x) for name, x in arguments.items() if not name.startswith("num_")}
    for language.program in range(*grid):  # type: ignore[attr-defined]
        Partition.failures.clear()
        function(**given)


def _argument(x: Any) -> Any:
    """An argument as the emulated kernel takes it: numbers as values."""
    if isinstance(x, Tensor):
        return Pointer(x)
    if hasattr(x, "block_shape"):
        return Descriptor(x.base, x.block_shape)
    return Value(x) if type(x) is int else x
