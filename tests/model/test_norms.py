"""`HeadNorm`: its parameters and initial values, and its knee: a buffer, which no cast changes, and the kept length."""

import math
import re

import pytest
import torch
import torch.nn.utils.parametrize
from torch import Tensor
from torch.nn.utils import prune

from hf_qknorm.model.norms import HeadNorm, initial_scalar_gain
from hf_qknorm.norms import NORMS, Shape, shown_knee
from hf_qknorm.ops.reference import head_norm
from hf_qknorm.scheme import CHANNEL_GAINS, GAINS, SCHEMES, Scheme
from qknorm_tests.covering import covering

HEADS, DIM = 3, 16
SHAPES = {"shared": (DIM,), "per_head": (HEADS, DIM), "scalar": (1,), "none": None}
ORDERS = [(norm, p) for norm, kind in NORMS.items() for p in ((1.0, 2.0, 3.0, 8.0) if kind.any_order else (2.0,))]


def make(norm: str = "rms", p: float = 2.0, knee: float = 4.0, power: float = 3.0, **options: object) -> HeadNorm:
    module = HeadNorm(norm, Scheme(q=norm, p=p), HEADS, DIM, **options)  # type: ignore[arg-type]
    if knee:
        module.set_shape(module.rounded(knee, power, 8.0))
    return module


def draw() -> Tensor:
    return torch.randn(2, 5, HEADS, DIM, generator=torch.Generator().manual_seed(0))


def shape_of(parameter: torch.nn.Parameter | None) -> tuple[int, ...] | None:
    return None if parameter is None else tuple(parameter.shape)


@pytest.mark.parametrize(
    ("gain", "bias", "norm"),
    covering(GAINS, (None, False, True), ("rms", "layer"), fits=lambda g, b, _: not b or g in CHANNEL_GAINS),
)
def test_parameters_have_the_schemes_shapes_and_fresh_values(gain: str, bias: bool | None, norm: str) -> None:
    module = HeadNorm(norm, Scheme(q=norm, gain=gain, bias=bias), HEADS, DIM, initial_gain=1.5)
    biased = (norm == "layer" if bias is None else bias) and gain in CHANNEL_GAINS
    assert shape_of(module.weight) == SHAPES[gain]
    assert shape_of(module.bias) == (SHAPES[gain] if biased else None)
    assert module.weight is None or (module.weight == 1.5).all()
    assert module.bias is None or (module.bias == 0).all()


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, 4.0])
def test_p_does_not_change_the_size_of_fresh_logits(p: float) -> None:
    generator = torch.Generator().manual_seed(0)
    head_dim = 512  # the size is that of Gaussians of many numbers: with 64 it is 3 % off for p = 4
    q, k = (torch.randn(400, 1, head_dim, generator=generator, dtype=torch.float64) for _ in range(2))

    def deviation(norm: str, scheme: Scheme) -> float:
        g = initial_scalar_gain(scheme, norm, 1024, head_dim, scale=1.0)
        normed = [head_norm(x, norm, p=scheme.p).squeeze(1) for x in (q, k)]
        return float((g * normed[0] @ normed[1].T).std())

    scheme = Scheme(q="lp", k="lp", p=p, gain="scalar", scale=1.0)
    assert deviation("lp", scheme) == pytest.approx(deviation("l2", SCHEMES["henry"]), rel=0.02)


@pytest.mark.parametrize("way", ["parametrization", "pruning", "functional call", "attribute"])
def test_the_gain_is_the_modules_wherever_it_is_kept(way: str) -> None:
    """FSDP's flat parameters keep views of them as plain attributes."""
    module, x = make(knee=0.0), draw()
    expected = 2 * module(x)
    doubled = 2 * module.weight.detach()
    given = {"weight": doubled} if way == "functional call" else {}
    if way == "parametrization":
        torch.nn.utils.parametrize.register_parametrization(module, "weight", _Doubled())
    elif way == "pruning":
        module.weight.data.mul_(2)
        prune.identity(module, "weight")
    elif way == "attribute":
        del module.weight
        module.weight = doubled
    found = torch.func.functional_call(module, given, (x,))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)  # a power of two rounds nothing


class _Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_a_search_in_powers_of_the_root_of_two_finds_them_again() -> None:
    for i in range(-4, 12):
        assert make(knee=2 ** (i / 2), power=0.37).ratio == pytest.approx(2 ** (i / 2), rel=1e-4)


@pytest.mark.parametrize(
    ("norm", "knee"), covering(ORDERS, [0.0, 1e-9, 2.0, 1000.0, 2.0**30, math.inf], strength=1), ids=str
)
def test_a_vector_of_the_mean_size_passes_unchanged(norm: tuple[str, float], knee: float) -> None:
    norm, p = norm
    module = HeadNorm(norm, Scheme(q=norm, p=p, bias=False), HEADS, DIM)
    module.set_shape(module.rounded(knee, 5.0, 8.0))
    x = draw() - draw().mean(-1, keepdim=True) if NORMS[norm].centred else draw()
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


# A stored knee, or none, and the end of the refusal.
BROKEN = {
    "shape": (torch.ones(2), "knee has shape [2], expected [3]"),
    "integers": (torch.ones(3, dtype=torch.int32), "knee has dtype int32"),
    "8 bits": (torch.ones(3).to(torch.float8_e4m3fn), "knee has dtype float8_e4m3fn"),
    "NaN": (torch.tensor([math.nan, 0.0, 1.0]), "knee is [nan, 0.0, 1.0], expected three finite numbers"),
    "sharpness": (torch.tensor([1.0, 1.0, 0.0]), "knee is [1.0, 1.0, 0.0], expected three finite numbers, the last at"),
    "none": (None, "weight is in the state dict and knee is not. Restore the weights"),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("case", BROKEN)
def test_an_impossible_knee_is_not_loaded(case: str, strict: bool) -> None:
    knee, message = BROKEN[case]
    state = {"weight": torch.ones(DIM)} | ({} if knee is None else {"knee": knee})
    with pytest.raises(RuntimeError, match=re.escape(message)):
        make().load_state_dict(state, strict=strict)


def test_a_knee_is_shown() -> None:
    assert "knee=2, sharpness=8" in str(make(knee=2.0, power=1e-6 * 2**20))
    assert "knee=∞" in str(make(knee=math.inf))
    assert "knee" not in str(make(knee=0.0))
    assert [shown_knee(x) for x in (0.0, 2.0**0.5, 2.0**30, math.inf)] == ["0", "1.41", "∞", "∞"]
    module = make(knee=0.0)
    module.set_shape(Shape(10.0))
    assert "eps=0.001024" in str(module)
