"""The machine below `gluon_emulator`: registers, shared memory, partitions, barriers, copies and products.

Partitions of a program take turns: one runs until it waits. What the hardware does on its own happens as early, or as
late, as it may. A product of matrices reads its factors when it is waited for, after all that others can do before it;
a copy to memory reads shared memory when it is waited for, and sees writes up to the last fence. A copy to shared
memory lands at once, or if `late` when its barrier is waited for. So a tile that is freed or read too early gives wrong
numbers, a result that is used before its wait an error, and barriers that never complete a deadlock, which is an error.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class BrokenKernelError(Exception):
    """What the hardware would not do."""


class Value:
    """A number or tensor in registers, with its layout, which only tensors have."""

    def __init__(self, x: Any, layout: Any = None) -> None:
        self.x, self.layout = torch.as_tensor(x), layout

    shape = property(lambda self: list(self.x.shape))
    dtype = property(lambda self: self.x.dtype)
    type = property(lambda self: self)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        return Value(self.x.view(dtype) if bitcast else self.x.to(dtype), self.layout)

    def __getitem__(self, key: Any) -> Value:
        return Value(self.x[key], self.layout.parent)

    def __index__(self) -> int:
        return int(self.x)

    def __bool__(self) -> bool:
        return bool(self.x)

    __hash__ = None  # type: ignore[assignment]


def elementwise(function: Callable[..., Any]) -> Callable[..., Value]:
    """The function of values and numbers, whose tensors must have one layout."""

    def apply(*arguments: Any) -> Value:
        if any(isinstance(x, Product) for x in arguments):
            raise BrokenKernelError("a product is used before it is waited for")
        values = [x if isinstance(x, Value) else Value(x) for x in arguments]
        layouts = {x.layout for x in values if x.layout is not None}
        if len(layouts) > 1:
            raise TypeError(f"values of different layouts: {layouts}")
        return Value(function(*(x.x for x in values)), layouts.pop() if layouts else None)

    return apply


def reverse(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: function(b, a)


for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor"):
    compute = getattr(operator, f"__{name}__")
    setattr(Value, f"__{name}__", elementwise(compute))
    setattr(Value, f"__r{name}__", elementwise(reverse(compute)))
for name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "invert"):
    setattr(Value, f"__{name}__", elementwise(getattr(operator, f"__{name}__")))


class Shared:
    """Shared memory: writes reach the copy engine at the writer's next fence."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.dtype = x, x.dtype

    def index(self, i: Any) -> Shared:
        return Shared(self.x[int(i)])

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.x.view(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.x.permute(order))

    def store(self, value: Value) -> None:
        Partition.own().writes.append(lambda: self.x.copy_(value.x))


class Partition:
    """A partition of a program: a thread that runs only in its turn."""

    current = threading.local()
    all: list[Partition] = []  # noqa: RUF012 - of the program that runs
    failures: list[BaseException] = []  # noqa: RUF012

    def __init__(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.turn, self.thread = threading.Semaphore(0), threading.Thread(target=self.run, daemon=True)
        self.ready: Callable[[], bool] = lambda: True
        self.last = False  # whether it goes on when no other can
        self.products: list[Product] = []
        self.writes: list[Callable[[], Any]] = []
        self.stores: list[Callable[[], Any]] = []

    @classmethod
    def own(cls) -> Partition:
        found: Partition = cls.current.partition
        return found

    def run(self) -> None:
        self.current.partition = self
        self.turn.acquire()
        try:
            if not self.failures:
                with torch.no_grad():  # as in the thread that waits for this one
                    self.function(*self.arguments)
        except BaseException as error:
            self.failures.append(error)
        self.all.remove(self)
        if self.all:
            self.next().turn.release()

    def wait(self, ready: Callable[[], bool], last: bool = False) -> None:
        """Give others their turns until `ready`; with `last`, until no other can go on."""
        self.ready, self.last = ready, last
        found = self.next()
        if found is not self:
            found.turn.release()
            self.turn.acquire()
        if self.failures:
            raise BrokenKernelError("another partition failed")

    def next(self) -> Partition:
        """The partition that goes on: the first after this one that is ready, those that are last after others."""
        place = self.all.index(self) + 1 if self in self.all else 0
        order = self.all[place:] + self.all[:place]
        found = [x for x in order if self.failures or x.ready()]
        if not found:
            self.failures.append(BrokenKernelError("a deadlock: every partition waits"))
            return order[0]
        return next((x for x in found if not x.last), found[0])


def warp_specialize(parts: list[tuple[Any, Any]], warps: list[int], registers: list[int]) -> None:
    Partition.all[:] = [Partition(*part) for part in parts]
    threads = [x.thread for x in Partition.all]
    for thread in threads:
        thread.start()
    Partition.all[0].turn.release()
    for thread in threads:
        thread.join()
    if Partition.failures:
        raise Partition.failures[0]


class Barrier:
    """A barrier of a phase, which ends with the last arrival and the last byte."""

    late = False

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0
        self.copies: list[Callable[[], None]] = []

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int = 1, nbytes: int = 0) -> None:
        if self.pending < count:
            raise BrokenKernelError("more arrivals than a barrier counts in a phase")
        self.pending -= count
        self.landed(-nbytes)

    def landed(self, nbytes: int) -> None:
        self.bytes -= nbytes
        if self.bytes < 0:
            raise BrokenKernelError("more bytes than a barrier expects")
        if self.pending == self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count

    def wait(self, parity: Any) -> None:
        def ready() -> bool:
            while self.copies:
                self.copies.pop(0)()
            return self.phase != int(parity)

        Partition.own().wait(ready)


class Barriers(list[Barrier]):
    def index(self, i: Any) -> Barrier:  # type: ignore[override]
        return self[int(i)]


def load_tile(descriptor: Any, at: list[Any], barrier: Barrier, tile: Shared) -> None:
    inside, part = descriptor.spans(at)

    def copy() -> None:
        whole = tile.x.view(descriptor.block).zero_()
        whole[part] = descriptor.data[inside]
        barrier.landed(descriptor.block_type.nbytes)

    barrier.copies.append(copy)
    if not Barrier.late:
        barrier.copies.pop()()


def store_tile(descriptor: Any, at: list[Any], tile: Shared) -> None:
    inside, part = descriptor.spans(at)
    stores = Partition.own().stores
    stores.append(lambda: descriptor.data.__setitem__(inside, tile.x.view(descriptor.block)[part]))


def fence() -> None:
    """The first, before partitions start, is for barriers."""
    writes = getattr(Partition.current, "partition", SimpleNamespace(writes=[])).writes
    while writes:
        writes.pop(0)()


def store_wait(pendings: int) -> None:
    stores = Partition.own().stores
    while len(stores) > pendings:
        stores.pop(0)()


class Product:
    """A product of matrices that is on its way."""

    def __init__(self, run: Callable[[], Value]) -> None:
        self.run = run
        self.result: Value | None = None


def warpgroup_mma(a: Any, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    found = Product(lambda: Value(a.x.float() @ b.x.float() + (acc.x if use_acc else 0.0), acc.layout))
    Partition.own().products.append(found)
    return found


def warpgroup_mma_wait(pendings: int, deps: tuple[Any, ...]) -> Any:
    own = Partition.own()
    if len(own.products) > pendings:
        own.wait(lambda: True, last=True)
    while len(own.products) > pendings:
        product = own.products.pop(0)
        product.result = product.run()
    if any(isinstance(x, Product) and x.result is None for x in deps):
        raise BrokenKernelError("a product is used before it is waited for")
    found = tuple(x.result if isinstance(x, Product) else x for x in deps)
    return found[0] if len(found) == 1 else found
