"""`HeadNorm` with a knee: the shape in its buffer, which no cast changes, and the length that it keeps."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.ops.norms import PLAIN, STEP, Shape, on_grid, shown_knee
from hf_qknorm.ops.reference import head_norm
from hf_qknorm.scheme import Scheme
from qknorm_tests.covering import covering

HEADS, DIM = 3, 16
NORMS = [("rms", 2.0), ("layer", 2.0), ("l2", 2.0), *(("lp", p) for p in (1.0, 2.0, 3.0, 8.0))]


def make(norm: str = "rms", p: float = 2.0, knee: float = 4.0, power: float = 3.0, **options: object) -> HeadNorm:
    module = HeadNorm(norm, Scheme(q=norm, p=p), HEADS, DIM, **options)  # type: ignore[arg-type]
    if knee:
        module.set_shape(module.rounded(knee, power, 8.0))
    return module


def draw() -> Tensor:
    return torch.randn(2, 5, HEADS, DIM, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("norm", "knee", "power"), covering(NORMS, [2**-0.5, 2.0, 2**2.5], [0.01, 1.0, 300.0], strength=1), ids=str
)
def test_the_shape_holds_knee_and_mean(norm: tuple[str, float], knee: float, power: float) -> None:
    norm, p = norm
    module = make(norm, p, knee, power)
    grid = 2 ** (1 / 8 * p / 2) - 1  # log2(P/eps) and log2(ε/eps) are below 64, in steps of 1/4 at most
    assert module.mean_power() == pytest.approx(power, rel=grid)
    assert module.ratio == pytest.approx(knee, rel=2 * grid)
    assert module.shape.sharpness == 8
    expected = head_norm(draw(), norm, module.weight, module.bias, p=p, knee=module.knee)
    assert torch.equal(module(draw()), expected)


def test_a_search_in_powers_of_the_root_of_two_finds_them_again() -> None:
    for i in range(-4, 12):
        assert make(knee=2 ** (i / 2), power=0.37).ratio == pytest.approx(2 ** (i / 2), rel=1e-4)


@pytest.mark.parametrize(
    ("norm", "knee"), covering(NORMS, [0.0, 1e-9, 2.0, 1000.0, 2.0**30, math.inf], strength=1), ids=str
)
def test_a_vector_of_the_mean_size_passes_unchanged(norm: tuple[str, float], knee: float) -> None:
    norm, p = norm
    module = HeadNorm(norm, Scheme(q=norm, p=p, bias=False), HEADS, DIM)
    module.set_shape(module.rounded(knee, 5.0, 8.0))
    x = draw() - draw().mean(-1, keepdim=True) if norm == "layer" else draw()
    power = x.abs().pow(module.order).mean(-1, keepdim=True)
    x = x * (module.mean_power() / power) ** (1 / module.order)
    torch.testing.assert_close(module(x), x, rtol=2e-6, atol=1e-6)
    assert (module.ratio == math.inf) == (knee >= 2.0**30)


@pytest.mark.parametrize(
    ("knee", "power"), [(1.0, math.nan), (1.0, math.inf), (1.0, -1.0), (-1.0, 1.0), (math.nan, 1.0)]
)
def test_impossible_numbers_are_refused(knee: float, power: float) -> None:
    with pytest.raises(ValueError, match=r"a knee of .* and a mean \|x\|ᵖ of .*expected numbers ≥ 0"):
        make().rounded(knee, power, 1.0)
    with pytest.raises(ValueError, match="beyond fp32"):
        make().rounded(16.0, 1e38, 1.0)


def test_a_norm_that_saw_no_inputs_has_eps_as_their_mean() -> None:
    module = make(power=0.0)
    assert module.mean_power() == pytest.approx(1e-6, rel=1e-2)
    assert module(draw()).isfinite().all()
    assert module.rounded(1e-30, 0.0, 1.0).epsilon == STEP  # 0 is the plain norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_numbers_on_the_grid_are_held_by_every_dtype(dtype: torch.dtype) -> None:
    numbers = torch.tensor([on_grid(x / 7) for x in range(-400, 700)], dtype=torch.float64)
    assert torch.equal(numbers.to(dtype).double(), numbers)
    module = make(power=0.123)
    before, cast = module.knee.clone(), copy.deepcopy(module).to(dtype)
    assert torch.equal(cast.knee.float(), before)
    assert cast.knee.dtype == dtype
    x = draw().to(dtype)
    expected = head_norm(x, "rms", cast.weight, knee=before)
    assert torch.equal(cast(x), expected)


def test_the_meta_device_holds_parameters_and_a_real_knee() -> None:
    """As vLLM builds a model, whose loader fills buffers in place."""
    module = make(knee=0.0, device=torch.device("meta"))
    assert (module.weight.is_meta, module.knee.device.type) == (True, "cpu")
    with torch.device("meta"):
        module = make(knee=0.0)
    assert module.knee.is_meta
    assert "knee" not in str(module)
    module.to_empty(device="cpu").reset_parameters()
    assert module.shape == PLAIN


def test_the_knee_may_move_between_the_passes() -> None:
    module, x = make(), draw().requires_grad_()
    expected = torch.autograd.grad(module(x).sum(), x)
    out = module(x)
    module.set_shape(PLAIN)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected[0])


BROKEN = {
    "shape": (torch.ones(2), "has shape [2], expected [3]"),
    "integers": (torch.ones(3, dtype=torch.int32), "has dtype int32"),
    "8 bits": (torch.ones(3).to(torch.float8_e4m3fn), "has dtype float8_e4m3fn"),
    "NaN": (torch.tensor([math.nan, 0.0, 1.0]), "expected three finite numbers"),
    "sharpness": (torch.tensor([1.0, 1.0, 0.0]), "the last at least 1"),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("case", BROKEN)
def test_an_impossible_knee_is_not_loaded(case: str, strict: bool) -> None:
    knee, message = BROKEN[case]
    state = make().state_dict() | {"knee": knee}
    with pytest.raises(RuntimeError) as raised:
        make().load_state_dict(state, strict=strict)
    assert f"knee {'' if case in ('shape', 'integers', '8 bits') else 'is '}" in str(raised.value)
    assert message in str(raised.value)


@pytest.mark.parametrize("strict", [True, False])
def test_gains_without_a_knee_are_of_an_older_version(strict: bool) -> None:
    with pytest.raises(RuntimeError, match="knee is not: it was written by a version before 1.0: convert it again"):
        make().load_state_dict({"weight": torch.ones(DIM)}, strict=strict)


def test_a_knee_is_shown() -> None:
    assert "knee=2, sharpness=8" in str(make(knee=2.0, power=1e-6 * 2**20))
    assert "knee=∞" in str(make(knee=math.inf))
    assert "knee" not in str(make(knee=0.0))
    assert [shown_knee(x) for x in (0.0, 2.0**0.5, 2.0**30, math.inf)] == ["0", "1.41", "∞", "∞"]
    module = make(knee=0.0)
    module.set_shape(Shape(10.0))
    assert "eps=0.001024" in str(module)
