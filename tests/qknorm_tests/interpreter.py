"""Triton's interpreter, which runs the kernels without a GPU, corrected for bf16.

It stores bf16 as uint16. So `tl.dot` multiplies bit patterns, arithmetic adds them, and a cast from fp32 truncates: all
without an error. After `install`, dots use the values, and casts round to nearest, ties to even; arithmetic on bf16,
which the kernels do in fp32, is refused. Dots of fp32 are summed in one fixed order: k·q equals q·k to the last bit, as
in compiled kernels, and backward recomputes the weights of forward. Triton 3.6 also reads loop bounds in a way that
numpy ≥ 2.4 forbids.

It is also slow without need. At each call of a device function it patches the whole language again: here, where a
kernel starts. It makes the sizes of each tensor and of its type anew: here, once for each shape. It checks integers for
overflow without reporting it: here, not at all. It compares types and shapes entry by entry, with a test of each for a
constexpr: here, it looks first whether they are one object or plain.
"""

import dataclasses
import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _LangPatchScope


def install() -> None:
    """Correct the interpreter, once; do nothing where kernels are compiled."""
    if not triton.knobs.runtime.interpret or InterpreterBuilder.cast_impl is _cast:
        return
    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = _cast, _dot  # the casts all look cast_impl up
    InterpreterBuilder.binary_op, interpreter._patch_lang_tensor = _binary, _patch_tensor
    interpreter._patch_lang = _patch_language
    tl.tensor.__init__, tl.block_type.__init__ = _make_tensor, _make_block
    tl.dtype.__eq__, tl.core._unwrap_if_constexpr, interpreter._get_np_dtype = _equal, _unwrap, _numpy_type
    TritonSemantic.broadcast_impl_value = _broadcast
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


_cast_else, _dot_else, _binary_else = (
    InterpreterBuilder.cast_impl,
    InterpreterBuilder.create_dot,
    InterpreterBuilder.binary_op,
)
_patch_tensor_else, _patch_language_else = interpreter._patch_lang_tensor, interpreter._patch_lang


def _widen(x: TensorHandle) -> TensorHandle:
    if x.dtype.scalar != tl.bfloat16:
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _cast(self: Any, x: TensorHandle, dtype: Any) -> TensorHandle:
    source, target = x.dtype.scalar, dtype.scalar
    if (source, target) == (tl.bfloat16, tl.float32):
        return _widen(x)
    if (source, target) == (tl.float32, tl.bfloat16):
        bits = np.ascontiguousarray(x.data).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return TensorHandle(np.where(np.isnan(x.data), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)
    return _cast_else(self, x, dtype)


def _dot(self: Any, a: TensorHandle, b: TensorHandle, acc: TensorHandle, *rest: Any) -> TensorHandle:
    if a.dtype.scalar != tl.float32:
        return _dot_else(self, _widen(a), _widen(b), acc, *rest)
    products = a.data[:, None, :] * b.data.T[None]
    return TensorHandle(products.sum(-1) + acc.data, acc.dtype.scalar)


def _binary(self: Any, a: TensorHandle, b: TensorHandle, op: Any) -> TensorHandle:
    if a.dtype.scalar == tl.bfloat16 or b.dtype.scalar == tl.bfloat16:
        raise TypeError(f"{op.__name__} of bf16 values, which the interpreter gets wrong: cast to fp32 first")
    return _binary_else(self, a, b, op)


def _patch_tensor(tensor: Any, scope: Any) -> None:
    _patch_tensor_else(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _patch_language(fn: Any) -> Any:
    """Patch all of the language where a kernel starts; the device functions that it calls find it patched."""
    if not tl.core.is_builtin(tl.load):
        return _LangPatchScope()
    return _patch_language_else(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


_make_block_else = tl.block_type.__init__


@cache
def _sizes(shape: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.sizes if type.is_block() else _sizes(())


@cache
def _block(shape: tuple[int, ...]) -> tl.block_type:
    block = object.__new__(tl.block_type)
    _make_block_else(block, tl.int1, list(shape))
    block.sizes, block.name = _sizes(tuple(block.shape)), f"<{block.shape}"
    return block


def _make_block(self: Any, element_ty: Any, shape: Any) -> None:
    block = _block(tuple([getattr(size, "value", size) for size in shape]))
    self.element_ty, self.shape, self.numel, self.sizes = element_ty, block.shape, block.numel, block.sizes
    self.name = f"{block.name}, {element_ty}>"


_equal_else, _unwrap_else, _numpy_type_else = tl.dtype.__eq__, tl.core._unwrap_if_constexpr, interpreter._get_np_dtype
_broadcast_else = TritonSemantic.broadcast_impl_value
_numpy_types: dict[str, np.dtype[Any]] = {}


def _equal(self: Any, other: Any) -> bool:
    return self.name == other.name if type(other) is tl.dtype else _equal_else(self, other)


def _unwrap(x: Any) -> Any:
    return _unwrap_else(x) if isinstance(x, (tl.constexpr, tl.tuple, tuple, list)) else x


def _numpy_type(dtype: Any) -> Any:
    name = dtype.scalar.name
    if name not in _numpy_types:
        _numpy_types[name] = _numpy_type_else(dtype)
    return _numpy_types[name]


def _broadcast(self: Any, a: Any, b: Any) -> tuple[Any, Any]:
    return (a, b) if a.shape is b.shape else _broadcast_else(self, a, b)
