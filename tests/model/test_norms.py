"""`HeadNorm`: its parameters, their initial values, and its result."""

import pytest
import torch
import torch.nn.utils.parametrize

from hf_qknorm.model.norms import HeadNorm, initial_scalar_gain
from hf_qknorm.ops.reference import head_norm
from hf_qknorm.scheme import CHANNEL_GAINS, GAINS, SCHEMES, Scheme
from qknorm_tests.covering import covering

HEADS, DIM = 3, 16
SHAPES = {"shared": (DIM,), "per_head": (HEADS, DIM), "scalar": (1,), "none": None}


def scheme_of(norm: str, gain: str, bias: bool | None = None) -> Scheme:
    return Scheme(q=norm, gain=gain, bias=bias, p=3 if norm == "lp" else 2)


def shape_of(parameter: torch.nn.Parameter | None) -> tuple[int, ...] | None:
    return None if parameter is None else tuple(parameter.shape)


@pytest.mark.parametrize(
    ("gain", "bias", "norm"),
    covering(GAINS, (None, False, True), ("rms", "layer"), fits=lambda g, b, _: not b or g in CHANNEL_GAINS),
)
def test_parameters_have_the_schemes_shapes_and_fresh_values(gain: str, bias: bool | None, norm: str) -> None:
    module = HeadNorm(norm, scheme_of(norm, gain, bias), HEADS, DIM, initial_gain=1.5)
    biased = (norm == "layer" if bias is None else bias) and gain in CHANNEL_GAINS
    assert shape_of(module.weight) == SHAPES[gain]
    assert shape_of(module.bias) == (SHAPES[gain] if biased else None)
    assert module.weight is None or (module.weight == 1.5).all()
    assert module.bias is None or (module.bias == 0).all()


@pytest.mark.parametrize(
    ("length", "g"), [(128, 13.99), (512, 18.0), (1024, 20.0), (2048, 22.0), (4096, 24.0), (8192, 26.0)]
)
def test_the_initial_scalar_is_henrys(length: int, g: float) -> None:
    assert initial_scalar_gain(SCHEMES["henry"], "l2", length, 64, scale=1.0) == pytest.approx(g, abs=0.005)


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


@pytest.mark.parametrize("way", ["parametrization", "functional call", "attribute"])
def test_the_gain_is_the_modules_wherever_it_is_kept(way: str) -> None:
    """FSDP's flat parameters keep views of them as plain attributes."""
    module, x = HeadNorm("rms", scheme_of("rms", "shared"), HEADS, DIM), torch.randn(2, 5, HEADS, DIM)
    expected = 2 * module(x)
    doubled = 2 * module.weight.detach()
    if way == "functional call":
        found = torch.func.functional_call(module, {"weight": doubled}, (x,))
    elif way == "parametrization":
        torch.nn.utils.parametrize.register_parametrization(module, "weight", _Doubled())
        found = module(x)
    else:
        del module.weight
        module.weight = doubled
        found = module(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)  # a power of two rounds nothing


class _Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight
