"""Norm and RoPE of queries and keys, in C++, in Triton and in few calls of torch, against the specification."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_qknorm.norms import NORMS, NormKind
from hf_qknorm.ops import library
from hf_qknorm.ops.cpu import norm_rope as cpp
from hf_qknorm.ops.reference import head_norm
from hf_qknorm.ops.types import Heads, Norm, Rotary
from hf_qknorm.scheme import Scheme
from qknorm_tests.covering import covering
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.norm_cases import BRAIN, CASES, DEVICE, Case, draw, expected, lay_out, leaves_of, with_parameters

Kernel = Callable[[Heads], tuple[Tensor, Tensor]]
KERNELS: dict[str, Kernel] = {"triton": library.norm_rope}
if DEVICE.type == "cpu":
    KERNELS["cpp"] = cpp.norm_rope
LONG = Case(head_dim=64, length=600, batch=2, heads=(4, 2))  # so many rows that threads share them
TAKEN = (*CASES, *(LONG._replace(norms=(kind, "rms")) for kind in ("layer", "l2")))
ROWS = [
    *(("cpp", case) for case in TAKEN if {*case.norms} <= {*cpp.KINDS} and "cpp" in KERNELS),
    *(("triton", case) for case in CASES),
]


def gradients_like(heads: Heads) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    dq, dk = (torch.randn(x.shape, generator=generator).to(DEVICE, x.dtype) for x in heads[:2])
    return dq, lay_out(dk, "tokens")


@pytest.fixture
def kernel(request: pytest.FixtureRequest, poison: None) -> Kernel:
    if request.param == "cpp":
        request.getfixturevalue("compiled")
    else:
        pytest.importorskip("triton", reason="needs Triton, which torch's CPU wheels lack: pip install triton")
        from qknorm_tests import interpreter

        interpreter.install()
    return KERNELS[request.param]


def results(kernel: Kernel, heads: Heads, grads: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """q̂, k̂ and every gradient."""
    leaves = {name: x.detach().requires_grad_() for name, x in leaves_of(heads).items()}
    made = kernel(with_parameters(heads, leaves))
    found = torch.autograd.grad(made, [*leaves.values()], grads)
    return {"q̂": made[0].detach(), "k̂": made[1].detach(), **dict(zip(leaves, found, strict=True))}


def check(kernel: Kernel, case: Case) -> None:
    heads = draw(case)
    grads = gradients_like(heads)
    got, exact, plain = (
        results(kernel, heads, grads),
        *(expected(heads, *grads, x) for x in (torch.float64, case.dtype)),
    )
    assert got.keys() == exact.keys()
    for name, x in got.items():
        assert x.dtype == case.dtype
        assert_within_budget(x, exact[name], plain[name], name)
    assert all(got[name].is_contiguous() for name in ("q̂", "k̂"))
    assert all(got[name].transpose(1, 2).is_contiguous() for name in "qk")
    with torch.no_grad():
        assert all(map(torch.equal, kernel(heads), (got["q̂"], got["k̂"])))


@pytest.mark.parametrize(("kernel", "case"), ROWS, ids=str, indirect=["kernel"])
def test_results_and_gradients(kernel: Kernel, case: Case) -> None:
    check(kernel, case)


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
def test_gradients_are_the_same_bits_on_each_run(kernel: Kernel) -> None:
    """Of expanded numbers with strides of zero, too, which are the gradient of a sum."""
    heads = draw(Case(length=70, gains=("per_head", "shared"), heads=(4, 2)))
    ones = tuple(torch.ones(1, device=DEVICE).expand(x.shape) for x in heads[:2])
    runs = [results(kernel, heads, grads) for grads in (ones, ones, tuple(x.contiguous() for x in ones))]
    assert all(torch.equal(x, run[name]) for run in runs[1:] for name, x in runs[0].items())


@pytest.mark.parametrize(
    ("kernel", "kind", "shape"),
    covering(
        KERNELS,
        NORMS,
        [(0.0, 0.0, 1.0), (22.0, 20.0, 1.0), (4.0, 0.0, 8.0)],
        fits=lambda x, y, _: x != "cpp" or y in cpp.KINDS,
    ),
    indirect=["kernel"],
    ids=str,
)
def test_rows_of_zeros_stay_and_get_no_gradient_and_nan_stays(
    kernel: Kernel, kind: str, shape: tuple[float, ...]
) -> None:
    """Neither without ε, in C++."""
    x = torch.randn(1, 2, 3, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[:, :, 1], x[:, :, 2, 3] = 0.0, torch.nan
    for eps in (1e-6, 0.0) if kernel is cpp.norm_rope and not shape[1] else (1e-6,):
        norm = Norm(kind, torch.ones(16, device=DEVICE), eps=eps, p=3.0, knee=torch.tensor(shape, device=DEVICE))
        got = results(kernel, Heads(x, x, x, norm, norm), (torch.ones_like(x),) * 2)
        assert not got["q̂"][:, :, 1].any()
        assert not got["q"][:, :, 1].any()
        assert got["q̂"][:, :, 2].isnan().any()


def test_one_tensor_alone() -> None:
    pytest.importorskip("triton")
    heads = draw(Case(norms=("lp", "none"), gains=("per_head", "none"), rotary=(0, "none"), knee=4.0))
    x = heads.q.detach().requires_grad_()
    grads, both = gradients_like(heads), []
    for made in (library.norm_rope_one(x, heads.q_norm, None), library.norm_rope(heads._replace(q=x))[0]):
        both.append((made, *torch.autograd.grad(made, x, grads[0])))
    torch.testing.assert_close(*both, rtol=0, atol=0)


def is_taken(x: Tensor, norm: Norm, rotary: Rotary | None = None) -> bool:
    return cpp.why_not(Heads(x, x, x, norm, Norm(), rotary)) is None


def test_heads_that_the_cpp_kernel_leaves_to_torch(compiled: None) -> None:
    """PyTorch broadcasts angles, or raises its own error."""
    x, taken, angles = torch.zeros(2, 2, 1, 16), Norm("rms", torch.ones(2, 16), torch.ones(16)), torch.ones(1, 1, 4)
    assert is_taken(x, taken, Rotary(angles, angles))
    for shape in ((3, 1, 4), (1, 2, 4), (1, 1, 9), (1, 4)):
        assert not is_taken(x, taken, Rotary(torch.ones(shape), torch.ones(shape)))
    for other in (x.double(), x.to("meta"), torch.zeros(1, 2, 1, 300)):
        assert not is_taken(other, Norm("rms"))
    assert not any(is_taken(x, Norm(kind)) for kind in ("lp", "unknown"))


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


NEW: dict[str, tuple[NormKind, Callable[[Tensor], Tensor]]] = {  # properties that no norm combines, sizes without ε
    "_new_layer": (NormKind("unit LayerNorm", centred=True, summed=True), lambda x: centred(x).norm(dim=-1)),
    "_new_power": (NormKind("the power mean", any_order=True), lambda x: x.abs().pow(3).mean(-1).pow(1 / 3)),
    "_new_lp": (
        NormKind("the Lp norm", centred=True, summed=True, any_order=True),
        lambda x: centred(x).norm(p=3, dim=-1),
    ),
}


@pytest.mark.parametrize("kernel", ["triton"], indirect=True)
@pytest.mark.parametrize("name", NEW)
def test_a_new_norm_is_one_entry(name: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemes, cards, the specification and the kernels take it from there."""
    kind, size = NEW[name]
    with pytest.raises(ValueError, match=r"expected one of .* \"auto\" or None"):
        Scheme(q=name)
    monkeypatch.setitem(NORMS, name, kind)
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = (centred(x) if kind.centred else x) / size(x)[..., None]
    torch.testing.assert_close(head_norm(x, name, eps=1e-30, p=3.0), y)
    check(kernel, Case(norms=(name, name), head_dim=40, rotary=(20, "half"), gains=("shared", "none")))
    check(kernel, Case(norms=("rms", name), head_dim=64, dtype=BRAIN, biases=("none", "shared"), knee=4.0))
