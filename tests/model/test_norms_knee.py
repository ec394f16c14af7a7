"""`HeadNorm` with a knee: the tensor of its ε, which `set_knee` fills and casts leave unchanged."""

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor

from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.ops.reference import head_norm
from hf_qknorm.scheme import GAINS, Scheme

HEADS, DIM = 3, 16
META = torch.device("meta")
NORMS = [("rms", 2.0), ("layer", 2.0), ("l2", 2.0), *(("lp", p) for p in (1.0, 2.0, 3.0, 8.0))]

every_norm = pytest.mark.parametrize(("norm", "p"), NORMS, ids=str)


def make(norm: str = "rms", p: float = 2.0, knee: float = 4.0, eps: float = 1e-6, **options: object) -> HeadNorm:
    return HeadNorm(norm, Scheme(q=norm, p=p, knee=knee, eps=eps), HEADS, DIM, **options)


def draw() -> Tensor:
    return torch.randn(2, 5, HEADS, DIM, generator=torch.Generator().manual_seed(0))


@every_norm
@pytest.mark.parametrize("power", [1e-4, 1.0, 300.0])
def test_eps_is_the_knee_times_the_mean_power(norm: str, p: float, power: float) -> None:
    module = make(norm, p, eps=1e-3)
    module.set_knee(0.5, power)
    assert module.order == p
    expected = (1e-3 ** (p / 2) + 0.5 * power) ** (2 / p)
    assert float(module.eps) == pytest.approx(expected, rel=1e-6)
    assert module.mean_power() == pytest.approx(power, rel=1e-5)
    x = draw()
    assert torch.equal(module(x), head_norm(x, norm, module.weight, module.bias, eps=module.eps, p=p))
    assert module.as_norm(x.device).eps is module.eps


def test_a_mean_power_below_the_rounding_error_reads_as_zero() -> None:
    module = make(eps=1e-6)
    for power in (0.0, *torch.logspace(-20, -12, 50, dtype=torch.float64).tolist()):
        module.set_knee(0.7, power)
        assert module.mean_power() >= 0
        assert module.mean_power() == pytest.approx(power, abs=2e-13)


@pytest.mark.parametrize(
    ("norm", "p", "power"),
    [
        ("rms", 2.0, math.nan),
        ("rms", 2.0, math.inf),
        ("l2", 2.0, -1.0),
        ("layer", 2.0, 1e39),
        ("lp", 1.0, 1e30),
        ("lp", 1.0, -1.0),
    ],
)
def test_an_eps_beyond_fp32_is_refused(norm: str, p: float, power: float) -> None:
    module = make(norm, p)
    before = copy.deepcopy(module)
    with pytest.raises(ValueError, match=r"a knee of 0\.5 and a mean \|x\|ᵖ of .*expected 1\.2e-38 to 3\.4e\+38"):
        module.set_knee(0.5, power)
    assert (module.knee, float(module.eps)) == (before.knee, float(before.eps))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_cast_leaves_eps_as_it_is(dtype: torch.dtype) -> None:
    module = torch.nn.Sequential(make())
    module[0].set_knee(4.0, 1.2345678)
    before = module[0].eps.clone()
    for cast in (module.to(dtype), module.float(), module.half(), module.double(), module.type(dtype)):
        assert cast[0].eps.dtype == torch.float32
        assert torch.equal(cast[0].eps, before)
        assert list(cast[0].state_dict()) == ["weight", "eps"]
    assert module[0].weight.dtype == dtype
    assert module[0](draw().to(dtype)).dtype == dtype


@pytest.mark.parametrize("gain", [True, False])
def test_the_meta_device_leaves_eps_where_it_is(gain: bool) -> None:
    module = make(gain=gain)
    before = float(module.eps)
    assert module.to("meta").eps.device.type == "cpu"
    assert float(module.to_empty(device="cpu").eps) == before


def test_copies_hold_their_own_eps() -> None:
    module = make()
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        copied.set_knee(2.0, 9.0)
        assert (float(copied.eps), copied.knee) == (pytest.approx(18.0), 2.0)
        assert float(module.eps) == pytest.approx(4.0)


def test_the_meta_device_takes_gains_and_not_the_knee() -> None:
    for module in (make(device=META), make().to("meta")):
        assert module(draw().to("meta")).shape == draw().shape
        module.set_knee(2.0, 9.0)
        module.half()
        assert (module.eps.device.type, module.eps.dtype, float(module.eps)) == (
            "cpu",
            torch.float32,
            pytest.approx(18),
        )
        module.to_empty(device="cpu").reset_parameters()
        assert module.half()(draw().half()).isfinite().all()
    with META:
        assert make().eps.device.type == "cpu"


def test_an_older_pickle_holds_eps_as_a_buffer() -> None:
    module, older = make(), make()
    module.set_knee(4.0, 3.0)
    del older.eps
    older.register_buffer("eps", module.eps.clone())
    again = pickle.loads(pickle.dumps(older))
    assert (list(again.named_buffers()), again.mean_power()) == ([], pytest.approx(3.0))
    assert torch.equal(again(draw()), module(draw()))


@pytest.mark.parametrize("gain", GAINS)
def test_a_loader_finds_eps_in_a_model_on_the_meta_device(gain):
    """As vLLM's, which refuses tensors of a checkpoint that are neither parameters nor buffers."""
    scheme = Scheme(q="rms", k="rms", gain=gain, knee=4.0)
    for has_gain in {gain != "none", False}:  # keys have none beside a scalar gain
        norm = HeadNorm("rms", scheme, 2, 16, gain=has_gain, device=torch.device("meta"))
        assert "eps" in dict(norm.named_buffers())
        assert norm.half()._buffers["eps"] is not norm.eps
        copied = copy.deepcopy(norm)
        assert "eps" in dict(copied.named_buffers())
        assert torch.equal(copied.eps, norm.eps)
