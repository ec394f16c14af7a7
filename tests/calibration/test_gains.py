"""The sums from one pass over a text, and the gains and biases that follow from them."""

from __future__ import annotations

import pytest
import torch

from hf_qknorm import Scheme
from hf_qknorm.calibration.gains import NormSums
from hf_qknorm.calibration.knees import KNEES
from hf_qknorm.measure.distributed import ONE_PROCESS
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.ops.norms import NORMS
from hf_qknorm.ops.reference import head_norm
from qknorm_tests.covering import covering

ORDERS = {"rms": 2.0, "layer": 2.0, "l2": 2.0, "lp": 3.0}


def heads(count: int, spread: float = 1.0, seed: int = 0) -> torch.Tensor:
    """Vectors `[N, 2, 16]` whose lengths vary by a factor of ten and more, with a mean."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, 16, dtype=torch.float64, generator=generator) + 0.3
    return x * spread * (2.0 * torch.rand(count, 2, 1, dtype=torch.float64, generator=generator)).exp()


@pytest.mark.parametrize(
    ("norm", "expected", "exportable"), covering(NORMS, [0.5, 1.0, 2.0], [False, True], strength=1)
)
def test_interpolated_sums_are_those_of_the_norm_at_any_knee(norm, expected, exportable):
    if exportable and norm not in ("rms", "layer", "l2"):
        pytest.skip("an export has norms of order 2")
    scheme = Scheme(q=norm, p=ORDERS[norm])
    x = heads(200)
    module = HeadNorm(norm, scheme, 2, 16)
    y = x - x.mean(-1, keepdim=True) if norm == "layer" else x
    power = float(y.abs().pow(module.order).mean())
    found = NormSums(module, KNEES, expected * power, 1.0, exportable)
    for part in x.split(64):
        found.add(part)
    assert found.power.value == pytest.approx(power, rel=1e-12)
    for knee in (0.0, 0.5, 1.7, 4.0, 32.0):
        module.set_shape(found.shape(knee))
        n = head_norm(x, norm, p=module.p, knee=module.knee)
        exact = [(n * n).sum(0), (n * x).sum(0), n.sum(0), x.sum(0)]
        scale = [(n * n).sum(0), (n * x).abs().sum(0), n.abs().sum(0), x.abs().sum(0)]
        for got, want, size in zip(found.at(knee), exact, scale, strict=False):
            assert ((got - want).abs() <= (1e-4 if knee else 1e-6) * size).all(), knee


@pytest.mark.parametrize("power", [0.0, 1e-9, 0.3, 70.0])
def test_an_exportable_eps_is_a_power_of_4_times_the_schemes(power):
    found = NormSums(HeadNorm("rms", Scheme(q="rms", eps=1.5e-6), 2, 16), (16.0,), 1.0, 1.0, True)
    found.power.add(torch.tensor(power))
    shape = found.shape(16.0)
    assert (shape.epsilon % 2, shape.power, shape.sharpness) == (0, 0, 1)
    eps = 1.5e-6 * 2**shape.epsilon
    assert max(1.5e-6, 7.9 * power) <= eps <= 2.1 * (1.5e-6 + 16.0 * max(power, 1.5e-6))


def test_the_bias_of_a_sharp_layer_norm_is_the_mean_that_it_takes_off():
    found = NormSums(HeadNorm("layer", Scheme(q="layer"), 2, 16), (2.0,), 0.0, 8.0, False)
    found.add(x := heads(50))
    _, bias = found.solve(2.0, (2, 16), True, ONE_PROCESS)
    torch.testing.assert_close(bias, x.mean((0, 2))[:, None].expand(-1, 16))
