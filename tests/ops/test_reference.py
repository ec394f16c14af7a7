"""The oracle's head norms and rotation, against the definitions of torch and transformers."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as interleaved
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as halves

from hf_qknorm.norms import NORMS, PLAIN
from hf_qknorm.ops.reference import head_norm, norm_rope, norm_rope_one
from hf_qknorm.ops.types import Heads, Norm, Rotary
from qknorm_tests.covering import covering

HEADS, DIM = 3, 12
ORDERS = [(norm, p) for norm, kind in NORMS.items() for p in ((1.0, 1.5, 2.0, 3.0, 4.0) if kind.any_order else (2.0,))]
GAINS = {"none": None, "shared": (DIM,), "per_head": (HEADS, DIM), "scalar": (1,)}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

every_norm = pytest.mark.parametrize(("norm", "p"), ORDERS, ids=str)


def each_norm_with(*names: str, axes: tuple, strength: int = 2) -> pytest.MarkDecorator:
    """Every norm with values of other parameters, every two of which meet."""
    rows = covering(ORDERS, *axes, strength=strength)
    return pytest.mark.parametrize(("norm", "p", *names), [(*norm, *rest) for norm, *rest in rows], ids=str)


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_and_layer_are_torchs_functions(eps: float) -> None:
    x = draw(2, 5, HEADS, DIM)
    close(head_norm(x, "rms", eps=eps), F.rms_norm(x, (DIM,), eps=eps))
    close(head_norm(x, "layer", eps=eps), F.layer_norm(x, (DIM,), eps=eps))


LOGS = (-10.0, -1.0, 2.0, 13.5)  # log2 ε with eps = 1, where the mean square is about 1
SHARPNESSES = (1.0, 2.0, 3.5, 8.0)


def by_definition(x: Tensor, norm: str, p: float, eps: float, sharpness: float) -> Tensor:
    """Each norm from torch's vector norms: n = x / ‖(‖x‖ₚ, (D·ε^(p/2))^(1/p))‖ of order p·s (times D^(1/p))."""
    centred = x - x.sum(-1, keepdim=True) / DIM if NORMS[norm].centred else x
    size = torch.linalg.vector_norm(centred, ord=p, dim=-1, keepdim=True)
    knee = torch.full_like(size, (DIM * eps ** (p / 2)) ** (1 / p))
    longer = torch.linalg.vector_norm(torch.cat([size, knee], -1), ord=p * sharpness, dim=-1, keepdim=True)
    return centred / longer * (1.0 if NORMS[norm].summed else DIM ** (1 / p))


@each_norm_with("log", "sharpness", "held", axes=((*LOGS, 40.0), SHARPNESSES, (False, True)))
def test_with_a_knee_each_norm_is_its_definition(norm: str, p: float, log: float, sharpness: float, held: bool) -> None:
    """A norm that holds a mean size, of 8 here, passes vectors of this size unchanged."""
    x = draw(5, HEADS, DIM) * draw(5, HEADS, 1, seed=1).exp()
    expected = by_definition(x, norm, p, 2.0**log, sharpness)
    if held:
        order = NORMS[norm].order(p)
        mean = x - x.mean(-1, keepdim=True) if NORMS[norm].centred else x
        mean = mean / mean.abs().pow(order).mean(-1, keepdim=True).pow(1 / order) * 8**0.5
        expected = expected * (mean / by_definition(mean, norm, p, 2.0**log, sharpness))[:1, :1, :1]
    knee = torch.tensor([log, 3.0 if held else 0.0, sharpness])
    close(head_norm(x, norm, eps=1.0, p=p, knee=knee), expected)


@every_norm
def test_the_plain_shape_changes_no_bit_and_others_are_read_in_bfloat16(norm: str, p: float) -> None:
    x = draw(5, HEADS, DIM, dtype=torch.float32).requires_grad_()
    fine = torch.tensor([10.01, 8.02, 7.99])
    for knees in ((None, torch.tensor(PLAIN)), (fine, fine.bfloat16())):
        results = [head_norm(x, norm, p=p, knee=knee) for knee in knees]
        assert torch.equal(*results)
        assert torch.equal(*(torch.autograd.grad(y.sin().sum(), x)[0] for y in results))


@each_norm_with("gain", "with_bias", axes=(GAINS, (False, True)), strength=1)
def test_gain_and_bias_come_after_the_norm(norm: str, p: float, gain: str, with_bias: bool) -> None:
    x, shape = draw(2, 5, HEADS, DIM), GAINS[gain]
    weight = draw(*shape, seed=1) if shape else None
    bias = draw(*(shape or (DIM,)), seed=2) if with_bias else None
    expected = head_norm(x, norm, p=p)
    for head in range(HEADS):
        if weight is not None:
            expected[:, :, head] *= weight.expand(HEADS, DIM)[head]
        if bias is not None:
            expected[:, :, head] += bias.expand(HEADS, DIM)[head]
    close(head_norm(x, norm, weight, bias, p=p), expected)


@each_norm_with("dtype", axes=(DTYPES,), strength=1)
def test_the_result_has_the_inputs_dtype_and_is_rounded_once(norm: str, p: float, dtype: torch.dtype) -> None:
    x, weight, bias = draw(2, 5, HEADS, DIM, dtype=dtype), draw(DIM, dtype=torch.float32), draw(DIM, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    got = head_norm(x, norm, weight, bias, p=p)
    assert got.dtype == dtype
    assert torch.equal(got, head_norm(x.to(wide), norm, weight, bias, p=p).to(dtype))


@each_norm_with("knee", "dtype", axes=((None, (22.0, 0.0, 1.0), (22.0, 20.0, 8.0)), DTYPES), strength=1)
def test_zero_rows_stay_zero_and_get_zero_gradients(
    norm: str, p: float, knee: tuple[float, ...] | None, dtype: torch.dtype
) -> None:
    x = draw(4, HEADS, DIM, dtype=dtype)
    x[1], x[2, 0] = 0, 0
    zero = (x.requires_grad_() == 0).all(-1)
    y = head_norm(x, norm, p=p, knee=None if knee is None else torch.tensor(knee))
    y.backward(draw(*x.shape, dtype=dtype, seed=1))
    assert (y[zero] == 0).all()
    assert (y[~zero] != 0).all()
    assert torch.isfinite(x.grad).all()
    assert (x.grad[zero] == 0).all()
    assert dtype == torch.float16 or (x.grad[~zero] != 0).any(-1).all()


MAGNITUDES = [(torch.float16, 6e4), (torch.bfloat16, 1e18), (torch.float32, 1e18), (torch.float32, 1e30)]


@pytest.mark.parametrize(("norm", "p"), [*ORDERS, ("lp", 8.0), ("lp", 64.0)], ids=str)
def test_huge_inputs_stay_finite_and_exact(norm: str, p: float) -> None:
    for dtype, magnitude in MAGNITUDES:
        x = (draw(4, HEADS, DIM).clamp(-1, 1) * magnitude).to(dtype).requires_grad_()
        y = head_norm(x, norm, p=p)
        y.backward(torch.ones_like(y))
        assert torch.isfinite(y).all()
        assert torch.isfinite(x.grad).all()
        if not NORMS[norm].any_order and magnitude > 1e18:
            continue  # the mean square overflows fp32, as in torch.nn.functional.rms_norm; Lp rescales first
        exact = head_norm(x.detach().double(), norm, p=p)
        eps = max(torch.finfo(dtype).eps, 8 * torch.finfo(torch.float32).eps)  # fp32 steps add up to a few roundings
        torch.testing.assert_close(y.detach().double(), exact, rtol=eps, atol=eps * float(exact.abs().max()))


@each_norm_with("gain", axes=(GAINS,), strength=1)
def test_gradients_are_those_of_the_definition(norm: str, p: float, gain: str) -> None:
    x = draw(1, HEADS, DIM)
    x = (x + 0.1 * x.sign()).requires_grad_()  # |x|ᵖ has a kink at 0
    shape = GAINS[gain]
    gains = [draw(*shape, seed=seed).requires_grad_() for seed in (1, 2)] if shape else []
    for shape in ((0.0, 0.0, 1.0), (22.0, 20.0, 1.0), (20.0, 20.5, 8.0)):
        knee = torch.tensor(shape)
        assert torch.autograd.gradcheck(
            lambda x, *gains, knee=knee: head_norm(x, norm, *gains, p=p, knee=knee), (x, *gains)
        )


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown norm 'batch'"):
        head_norm(draw(1, 1, 4), "batch")


@pytest.mark.parametrize("width", [4, DIM])
@pytest.mark.parametrize("rotate", [halves, interleaved], ids=["half", "interleaved"])
@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
def test_the_rotation_after_the_norm_is_that_of_transformers(norm, rotate, width):
    q, k, v = (draw(2, heads, 7, DIM, seed=heads) for heads in (HEADS, 1, 2))
    gain = draw(DIM) if norm != "none" else None
    angle = draw(2, 7, width // 2)
    normed = [
        x if norm == "none" else head_norm(x.transpose(1, 2), norm, gain).transpose(1, 2).contiguous() for x in (q, k)
    ]
    expected = rotate(*normed, *(torch.cat([x, x], -1) for x in (angle.cos(), angle.sin())))
    one, rotary = Norm(norm, gain), Rotary(angle.cos(), angle.sin(), rotate is interleaved)
    found = norm_rope(Heads(q, k, v, one, one, rotary))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    assert torch.equal(norm_rope_one(q, one, rotary), found[0])


def test_the_rotation_is_rounded_once():
    x, angle = draw(2, HEADS, 7, DIM, dtype=torch.bfloat16), draw(2, 7, DIM // 2)
    rotary = Rotary(angle.cos(), angle.sin(), False)
    assert torch.equal(norm_rope_one(x, Norm(), rotary), norm_rope_one(x.double(), Norm(), rotary).bfloat16())
    assert torch.equal(norm_rope_one(x, Norm(), None), x)
