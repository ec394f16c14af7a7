"""`library.attention`: torch's checks and transforms of operators, and errors for wrong arguments."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from hf_qknorm.ops import library, reference, tiled
from hf_qknorm.ops.checks import check_call
from hf_qknorm.ops.types import Norm, Options, Visible
from qknorm_tests.covering import covering
from qknorm_tests.operator_calls import call
from qknorm_tests.random_qkv import make_qkv
from qknorm_tests.tiled_cases import dropout_mask

F64 = torch.float64
SINKS = torch.linspace(-1, 2, 4)
MASK = (torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.7) | torch.eye(9, dtype=torch.bool)
RANGES = torch.tensor([[(max(t - 3 * b, 0), t + b) for t in range(9)] for b in range(2)], dtype=torch.int32)
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "capped": {"softcap": 5.0, "causal": True},
    "window": {"softcap": 5.0, "causal": True, "window": 4},
    "bidirectional_window": {"window": 2},
    "scale": {"scale": 0.7},
    "mask": {"softcap": 5.0, "mask": MASK},
    "additive": {"mask": torch.zeros(2, 1, 9, 9).masked_fill(~MASK, torch.finfo(torch.float32).min)},
    "ranges": {"softcap": 5.0, "ranges": RANGES},
    "sinks": {"softcap": 70.0, "sinks": SINKS, "causal": True},
    "dropout": {"dropout": 0.25, "softcap": 5.0},
}


def as_in_a_model(*tensors: Tensor) -> list[Tensor]:
    """The tensors laid out as `[B, T, H, D]`, as from projections."""
    return [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors]


def cast(options: dict, dtype: torch.dtype) -> dict:
    """The options with sinks in `dtype`, as leaves."""
    return options if "sinks" not in options else {**options, "sinks": SINKS.to(dtype, copy=True).requires_grad_()}


def gradients(out: Tensor, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out.sin().sum(), [x for x in inputs if x is not None])


@pytest.mark.parametrize(
    ("name", "dtype", "laid_out", "batch"),
    covering(OPTIONS, (torch.float32, torch.bfloat16), (True, False), (1, 2), strength=1),
    ids=str,
)
def test_the_operators_pass_torchs_opcheck(dtype: torch.dtype, laid_out: bool, batch: int, name: str) -> None:
    q, k, v = make_qkv(batch, 4, 2, 9, 9, 16, dtype=dtype)
    q, k, v = as_in_a_model(q, k, v) if laid_out else (q, k, v)
    options = cast(OPTIONS[name], dtype)
    mask = options["mask"][:batch] if "mask" in options else None
    ranges = options["ranges"][:batch] if "ranges" in options else None
    seed = torch.tensor([3]) if "dropout" in options else None
    numbers = {name: x for name, x in options.items() if name in Options._fields}
    visible = Visible(ranges, options.get("sinks"), seed, mask)
    values = [q, k, v, *visible, *Options(**{"scale": 0.25, **numbers})]
    values = [x.detach() if isinstance(x, Tensor) else x for x in values]
    opcheck(tiled.ATTENTION.overload, values, test_utils=("test_schema", "test_faketensor"))
    grad = torch.ones_like(tiled.ATTENTION(*values))
    opcheck(tiled.ATTENTION_BACKWARD.overload, (grad, *values), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(("name", "laid_out"), covering(OPTIONS, [False, True], strength=1))
def test_autograd_is_the_oracles(laid_out: bool, name: str) -> None:
    q, k, v = make_qkv(2, 4, 2, 9, 9, 16, dtype=F64)
    q, k, v = as_in_a_model(q, k, v) if laid_out else (q, k, v)
    options = cast(OPTIONS[name], F64)
    out, expected = dropped(q, k, v, options) if "dropout" in options else both(q, k, v, options)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    inputs = (q, k, v, options.get("sinks"))
    for got, exact in zip(gradients(out, *inputs), gradients(expected, *inputs), strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-12)


def both(q: Tensor, k: Tensor, v: Tensor, options: dict) -> tuple[Tensor, Tensor]:
    given = call(q, k, v, **options)
    return library.attention(*given), reference.attend(*given).out


def dropped(q: Tensor, k: Tensor, v: Tensor, options: dict) -> tuple[Tensor, Tensor]:
    """Output with dropout, and the oracle's with the mask that the same generator state gives."""
    heads, visible, settings = call(q, k, v, **options)
    torch.manual_seed(5)
    out = library.attention(heads, visible, settings)
    torch.manual_seed(5)
    visible = visible._replace(seed=torch.randint(torch.iinfo(torch.int64).max, (1,)))
    return out, reference.attend(heads, visible, settings, dropout_mask(heads, visible, settings)).out


@pytest.mark.parametrize(
    ("heads", "queries", "dtype"),
    [(4, 9, torch.bfloat16), (1, 9, torch.float16), (4, 1, torch.float32), (1, 1, F64)],
    ids=str,
)
def test_the_output_is_laid_out_for_the_output_projection(heads: int, queries: int, dtype: torch.dtype) -> None:
    q, k, v = make_qkv(2, heads, 1, queries, 9, 16, dtype=dtype)
    out = library.attention(*call(q, k, v, causal=True))
    assert out.shape == (2, heads, queries, 16)
    assert out.dtype == dtype
    assert out.transpose(1, 2).is_contiguous()


def test_the_same_generator_state_drops_the_same() -> None:
    q, k, v = (x.detach() for x in make_qkv(1, 2, 2, 200, 200, 16))

    def attend(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return library.attention(*call(q, k, v, causal=True, dropout=0.5))

    assert torch.equal(attend(1), attend(1))
    assert not torch.equal(attend(1), attend(2))
    torch.manual_seed(1)
    twice = [library.attention(*call(q, k, v, causal=True, dropout=0.5)) for _ in range(2)]
    assert not torch.equal(*twice)


def q_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


GOOD = {"q": q_of(2, 4, 5, 8), "k": q_of(2, 2, 7, 8), "v": q_of(2, 2, 7, 8)}
WRONG = [
    ({"q": q_of(4, 5, 8)}, r"expected q \[B, H, T, D\].*got \[4, 5, 8\]"),
    ({"k": q_of(2, 7, 8), "v": q_of(2, 7, 8)}, r"expected q .*\[2, 7, 8\]"),
    ({"v": q_of(2, 2, 6, 8)}, r"expected q .*\[2, 2, 6, 8\]"),
    ({"v": q_of(2, 2, 7, 4)}, r"expected q .*\[2, 2, 7, 4\]"),
    ({"q": q_of(1, 4, 5, 8)}, r"q \[1, 4, 5, 8\] and k \[2, 2, 7, 8\] do not fit"),
    ({"q": q_of(2, 4, 5, 16)}, r"q \[2, 4, 5, 16\] and k .* do not fit: batch and head_dim must be equal"),
    ({"q": q_of(2, 3, 5, 8)}, r"q \[2, 3, 5, 8\] and k .* a multiple of the key heads"),
    ({"q": q_of(2, 4, 5, 8, dtype=torch.bfloat16)}, r"share a dtype, got torch.bfloat16, torch.float32"),
    ({"v": q_of(2, 2, 7, 8, dtype=torch.float16)}, r"share a dtype, .*torch.float16: cast q and k to v's"),
    ({"mask": q_of(5, 7)}, r"the mask must broadcast to \[B, H, T, S\] = \[2, 4, 5, 7\], got \[5, 7\]"),
    ({"mask": q_of(2, 1, 5, 6)}, r"the mask must broadcast .* got \[2, 1, 5, 6\]"),
    ({"mask": q_of(2, 2, 5, 7)}, r"the mask must broadcast .* got \[2, 2, 5, 7\]"),
    ({"ranges": q_of(2, 1, 5, 2)}, r"ranges must be .* \[B or 1, T, 2\] with B = 2 and T = 5, got \[2, 1, 5, 2\]"),
    ({"ranges": q_of(3, 5, 2)}, r"ranges must be .* got \[3, 5, 2\]"),
    ({"ranges": q_of(2, 7, 2)}, r"ranges must be .* got \[2, 7, 2\]"),
    ({"ranges": q_of(2, 5, 2, dtype=torch.int64)}, r"ranges must be int32, got torch.int64"),
    ({"sinks": q_of(2)}, r"sinks must be one logit a query head, \[4\], got \[2\]"),
    ({"sinks": q_of(1, 4)}, r"sinks must be .* got \[1, 4\]"),
    ({"dropout": -0.1}, r"dropout must be in \[0, 1\), got -0.1"),
    ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ({"dropout": math.nan}, r"dropout must be in \[0, 1\), got nan"),
    ({"q": q_of(2, 0, 5, 8)}, r"at least one head and one column, got q \[2, 0, 5, 8\]"),
    ({"k": q_of(2, 0, 7, 8), "v": q_of(2, 0, 7, 8)}, r"at least one head and one column, .* k \[2, 0, 7, 8\]"),
    ({x: q_of(2, 2, 5, 0) for x in "qkv"}, r"at least one head and one column, got q \[2, 2, 5, 0\]"),
    ({"mask": q_of(1, 1, 5, 7, dtype=torch.int64)}, r"the mask must be boolean .* got torch.int64"),
    ({"scale": math.nan}, r"scale must be finite and greater than 0, got nan"),
    ({"scale": math.inf}, r"scale must be finite and greater than 0, got inf"),
    ({"scale": -1.0}, r"scale must be finite and greater than 0, got -1.0"),
    *(
        ({"softcap": x}, rf"softcap must be finite and greater than 0, got {x}")
        for x in (0.0, -5.0, math.inf, math.nan)
    ),
    ({"window": 0, "causal": True}, r"window must be at least 1 with causal .* got 0: pass None"),
    ({"window": -1}, r"window must be at least 0 .* got -1: pass None"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[message for _, message in WRONG])
def test_arguments_that_do_not_fit_are_refused(wrong: dict, message: str) -> None:
    arguments = {**GOOD, **wrong}
    with pytest.raises(ValueError, match=message):
        check_call(*call(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments))


def test_raw_heads_are_refused() -> None:
    heads, *others = call(**GOOD)
    with pytest.raises(ValueError, match="use fused_attention for raw ones"):
        library.attention(heads._replace(k_norm=Norm("rms")), *others)


def test_arguments_that_broadcast_are_accepted() -> None:
    ranges = q_of(1, 5, 2, dtype=torch.int32)
    given = call(**GOOD, mask=q_of(1, 1, 1, 7), ranges=ranges, sinks=q_of(4), dropout=0.5)
    check_call(*given)
    assert library.attention(*given).shape == (2, 4, 5, 8)


@pytest.mark.parametrize(("dropout", "use_reentrant"), [(0.0, False), (0.3, False), (0.3, True)])
def test_gradient_checkpointing_gives_the_same_gradients(dropout: float, use_reentrant: bool) -> None:
    q, k, v = make_qkv(2, 4, 2, 70, 70, 16, dtype=F64)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return library.attention(*call(q, k, v, softcap=5.0, causal=True, dropout=dropout)).sin()

    torch.manual_seed(7)
    attend(q, k, v).sum().backward()
    expected = [x.grad for x in (q, k, v)]
    q.grad = k.grad = v.grad = None
    torch.manual_seed(7)
    out = checkpoint(attend, q, k, v, use_reentrant=use_reentrant)
    torch.rand(3)  # other code advances the generator in between
    out.sum().backward()
    for x, grad in zip((q, k, v), expected, strict=True):
        assert torch.equal(x.grad, grad)


def test_a_second_derivative_is_refused() -> None:
    q, k, v = make_qkv(1, 2, 1, 5, 5, 8)
    (grad,) = torch.autograd.grad(library.attention(*call(q, k, v)).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(("wanted", "compiled"), [("q", False), ("k", True), ("v", False), ("sinks", True)])
def test_forward_mode_is_refused(wanted: str, compiled: bool) -> None:
    """The operator would return a tangent of zero."""
    torch.compiler.reset()
    tensors = dict(zip("qkv", (x.detach() for x in make_qkv(1, 4, 2, 5, 5, 8)), strict=True)) | {
        "sinks": torch.zeros(4)
    }

    def tangent(x: Tensor) -> Tensor:
        attend = lambda y: library.attention(*call(**tensors | {wanted: y}))  # noqa: E731
        return torch.func.jvp(attend, (x,), (torch.ones_like(x),))[1]

    with pytest.raises(NotImplementedError, match="no forward-mode derivative.*hf_qknorm_eager"):
        (torch.compile(tangent, backend="eager") if compiled else tangent)(tensors[wanted])


FUNCTIONAL = {
    "grad": torch.func.grad,
    "vmap of grad": lambda f: lambda x: torch.vmap(torch.func.grad(f))(x[None]),
    "vjp": lambda f: lambda x: torch.func.vjp(f, x)[1](torch.ones(())),
    "jacrev": torch.func.jacrev,
}


@pytest.mark.parametrize("transform", FUNCTIONAL.values(), ids=FUNCTIONAL)
def test_functional_gradients_are_refused(transform: Any) -> None:
    q, k, v = (x.detach() for x in make_qkv(1, 4, 2, 5, 5, 8))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        transform(lambda x: library.attention(*call(x, k, v)).sum())(q)
