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


@every_norm
def test_the_initial_mean_power_is_one(norm: str, p: float) -> None:
    assert make(norm, p).mean_power() == pytest.approx(1.0, rel=1e-5)


def test_a_mean_power_below_the_rounding_error_reads_as_zero() -> None:
    module = make(eps=1e-6)
    for power in (0.0, *torch.logspace(-20, -12, 50, dtype=torch.float64).tolist()):
        module.set_knee(0.7, power)
        assert module.mean_power() >= 0
        assert module.mean_power() == pytest.approx(power, abs=2e-13)


def test_eps_is_saved_and_loaded() -> None:
    module, fresh = make(), make()
    assert list(module.state_dict()) == ["weight", "eps"]
    module.set_knee(4.0, 7.0)
    assert not torch.equal(fresh(draw()), module(draw()))
    held = fresh.eps
    fresh.load_state_dict(module.state_dict())
    assert fresh.eps is held
    assert fresh.mean_power() == module.mean_power()
    assert torch.equal(fresh(draw()), module(draw()))


def test_without_a_knee_eps_is_a_number() -> None:
    module = make(knee=0.0)
    assert list(module.state_dict()) == ["weight"]
    assert type(module.eps) is float
    with pytest.raises(ValueError, match="without a knee keeps no mean"):
        module.mean_power()


def test_a_knee_is_changed_in_place_and_removed() -> None:
    module, plain = make(), make(knee=0.0)
    held = module.eps
    module.set_knee(8.0, 2.0)
    assert module.eps is held
    assert (module.knee, float(held)) == (8.0, pytest.approx(16.0))
    for _ in range(2):
        module.set_knee(0.0)
        assert module.state_dict().keys() == plain.state_dict().keys()
        assert torch.equal(module(draw()), plain(draw()))
        assert repr(module) == repr(plain)
    module.set_knee(8.0, 2.0)
    assert float(module.eps) == pytest.approx(16.0)


@pytest.mark.parametrize(
    ("norm", "p", "power"),
    [("rms", 2.0, math.nan), ("rms", 2.0, math.inf), ("l2", 2.0, -1.0), ("layer", 2.0, 1e39), ("lp", 1.0, 1e30)],
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


def test_values_beyond_fp16_survive_it() -> None:
    module = make()
    module.set_knee(4.0, 1e6)
    assert float(module.half().eps) == pytest.approx(4e6)


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


def test_a_fake_tensor_passes_through() -> None:
    with torch._subclasses.FakeTensorMode():
        assert make()(draw()).shape == (2, 5, HEADS, DIM)


def test_the_exported_norm_holds_eps() -> None:
    module = make("layer")
    module.set_knee(4.0, 5.0)
    program = torch.export.export(module, (draw(),)).module()
    torch.testing.assert_close(program(draw()), module(draw()))


def test_an_assigned_state_dict_replaces_eps() -> None:
    module = make()
    module.load_state_dict({"weight": module.weight, "eps": torch.tensor(9.0)}, assign=True)
    assert module.mean_power() == pytest.approx(9 / 4)


@pytest.mark.parametrize("gain", GAINS)
def test_a_loader_finds_eps_in_a_model_on_the_meta_device(gain):
    """As vLLM's, which refuses tensors of a checkpoint that are neither parameters nor buffers."""
    scheme = Scheme(q="rms", k="rms", gain=gain, knee=4.0)
    for has_gain in {gain != "none", False}:  # keys have none beside a scalar gain
        norm = HeadNorm("rms", scheme, 2, 16, gain=has_gain, device=torch.device("meta"))
        assert "eps" in dict(norm.named_buffers())
