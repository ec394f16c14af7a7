"""`HeadNorm`: its parameters, their initial values, and its result."""

import pytest
import torch
import torch.nn.utils.parametrize

from hf_qknorm.model.norms import HeadNorm, initial_scalar_gain
from hf_qknorm.ops.norms import NORMS
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


@pytest.mark.parametrize("gain", GAINS)
def test_names_end_in_weight_and_bias(gain: str) -> None:
    """Trainer's weight-decay filter checks the end of the name."""
    parent = torch.nn.Module()
    parent.q_norm = HeadNorm("layer", scheme_of("layer", gain), HEADS, DIM)
    expected = {"shared": ["q_norm.weight", "q_norm.bias"], "per_head": ["q_norm.weight", "q_norm.bias"]}
    assert list(parent.state_dict()) == (["q_norm.weight"] if gain == "scalar" else expected.get(gain, []))


def test_a_norm_without_a_gain_has_none() -> None:
    module = HeadNorm("l2", SCHEMES["henry"], HEADS, DIM, gain=False)
    assert list(module.parameters()) == []


def test_reset_restores_the_fresh_values() -> None:
    module = HeadNorm("layer", Scheme(q="layer"), HEADS, DIM, initial_gain=2.0)
    torch.nn.init.normal_(module.weight)
    torch.nn.init.normal_(module.bias)
    module.reset_parameters()
    assert (module.weight == 2.0).all()
    assert (module.bias == 0).all()


@pytest.mark.parametrize(("gain", "norm"), covering(GAINS, NORMS, strength=1))
def test_it_computes_the_reference_norm(gain: str, norm: str) -> None:
    scheme = Scheme(q=norm, gain=gain, p=3 if norm == "lp" else 2, eps=1e-3)
    module = HeadNorm(norm, scheme, HEADS, DIM)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 5, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    expected = head_norm(x, norm, module.weight, module.bias, eps=1e-3, p=scheme.p)
    assert torch.equal(module(x), expected)


def test_bypass_returns_the_input() -> None:
    module = HeadNorm("rms", Scheme(q="rms"), HEADS, DIM)
    x = torch.randn(2, 5, HEADS, DIM)
    module.bypass = True
    assert module(x) is x
    module.bypass = False
    assert not torch.equal(module(x), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_have_the_requested_device_and_dtype(dtype: torch.dtype) -> None:
    meta = HeadNorm("layer", Scheme(q="layer"), HEADS, DIM, device=torch.device("meta"), dtype=dtype)
    assert {(p.device.type, p.dtype) for p in meta.parameters()} == {("meta", dtype)}
    real = HeadNorm("layer", Scheme(q="layer"), HEADS, DIM, dtype=dtype)
    assert {p.dtype for p in real.parameters()} == {dtype}
    x = torch.randn(2, 5, HEADS, DIM)
    assert real(x).dtype == torch.float32


@pytest.mark.parametrize(
    ("norm", "scheme", "text"),
    [
        ("rms", Scheme(q="rms"), "rms, gain=[16], bias=False, eps=1e-06"),
        ("layer", Scheme(q="layer", gain="per_head"), "layer, gain=[3, 16], bias=True, eps=1e-06"),
        ("l2", Scheme(q="l2", gain="none", eps=1e-3), "l2, gain=none, bias=False, eps=0.001"),
        ("lp", SCHEMES["lp"], "lp, p=3, gain=[1], bias=False, eps=1e-06"),
        ("rms", Scheme(q="rms", eps=0.5, knee=4), "rms, gain=[16], bias=False, eps=4.5, knee=4"),
        ("lp", Scheme(q="lp", p=4, knee=9), "lp, p=4, gain=[16], bias=False, eps=3, knee=9"),
    ],
    ids=["rms", "layer", "l2", "lp", "rms-knee", "lp-knee"],
)
def test_printing_a_model_shows_norm_gain_and_bias(norm: str, scheme: Scheme, text: str) -> None:
    assert repr(HeadNorm(norm, scheme, HEADS, DIM)) == f"HeadNorm({text})"


@pytest.mark.parametrize(
    ("length", "g"), [(128, 13.99), (512, 18.0), (1024, 20.0), (2048, 22.0), (4096, 24.0), (8192, 26.0)]
)
def test_the_initial_scalar_is_henrys(length: int, g: float) -> None:
    assert initial_scalar_gain(SCHEMES["henry"], "l2", length, 64, scale=1.0) == pytest.approx(g, abs=0.005)


def test_the_initial_scalar_is_divided_by_the_scale() -> None:
    one, half = (initial_scalar_gain(SCHEMES["henry"], "l2", 1024, 64, scale) for scale in (1.0, 0.5))
    assert half == pytest.approx(2 * one)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_the_initial_scalar_of_other_norms_is_one(norm: str) -> None:
    assert initial_scalar_gain(Scheme(q=norm, gain="scalar"), norm, 1024, 64, scale=0.125) == 1.0


@pytest.mark.parametrize("length", [0, 1, 2])
def test_the_shortest_model_has_a_positive_scalar(length: int) -> None:
    assert initial_scalar_gain(SCHEMES["henry"], "l2", length, 64, scale=1.0) == pytest.approx(1.0)


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
