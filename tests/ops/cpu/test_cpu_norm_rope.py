"""Norm and RoPE in C++: within the error budget, with their gradients, and taken by models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from transformers import LlamaConfig, LlamaForCausalLM

from hf_qknorm import patch_model
from hf_qknorm.families.style import CACHE
from hf_qknorm.ops import reference
from hf_qknorm.ops.cpu import build, norm_rope
from hf_qknorm.ops.types import Heads, Norm, Rotary
from qknorm_tests.covering import covering
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.norm_cases import CASES, DEVICE, Case, draw, expected, gradients_like

LONG = Case(head_dim=64, length=600, batch=2, heads=(4, 2))  # so many rows that threads share them
LONGER = [LONG._replace(norms=(kind, "rms")) for kind in ("rms", "layer", "l2")]
TAKEN = [case._replace(factor=1.0) for case in (*CASES, *LONGER) if "lp" not in case.norms]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the cases are drawn on the GPU")
@pytest.mark.parametrize("case", TAKEN, ids=str)
def test_results_and_gradients(case: Case) -> None:
    call = draw(case)
    dq, dk = gradients_like(call)
    leaves = {name: x.detach().requires_grad_() for name, x in call.leaves.items()}
    norms = (
        norm._replace(gain=leaves.get(f"{side}_gain"), bias=leaves.get(f"{side}_bias"))
        for side, norm in (("q", call.q_norm), ("k", call.k_norm))
    )
    heads = Heads(leaves["q"], leaves["k"], leaves["k"], *norms, call.rotary)
    made = norm_rope.norm_rope(heads)
    got = dict(zip(leaves, torch.autograd.grad(made, [*leaves.values()], (dq, dk)), strict=True))
    *exact, exact_gradients = expected(call, dq, dk, torch.float64)
    *eager, eager_gradients = expected(call, dq, dk, case.dtype)
    for name, x, *wanted in zip("qk", made, exact, eager, strict=True):
        assert_within_budget(x.detach(), *wanted, name)
    for name, value in exact_gradients.items():
        assert got[name].dtype == case.dtype
        assert_within_budget(got[name], value, eager_gradients[name], f"gradient of {name}")
    assert all(x.is_contiguous() for x in made)
    assert all(got[name].transpose(1, 2).is_contiguous() for name in "qk")
    with torch.no_grad():
        assert all(map(torch.equal, norm_rope.norm_rope(heads), made))
    again = torch.autograd.grad(norm_rope.norm_rope(heads), [*leaves.values()], (dq, dk))
    assert all(map(torch.equal, again, got.values()))


def one(x: Tensor, norm: Norm, rotary: Rotary | None = None) -> Tensor:
    """The queries' result, with keys that have neither norm nor rotation."""
    return norm_rope.norm_rope(Heads(x, x, x, norm, Norm(), rotary))[0]


def is_taken(x: Tensor, norm: Norm, rotary: Rotary | None = None) -> bool:
    return norm_rope.why_not(Heads(x, x, x, norm, Norm(), rotary)) is None


def shaped(eps: float, sharpness: float) -> Norm:
    """An RMSNorm with this ε, which is the scheme's eps, and a sharpness."""
    return Norm("rms", eps=eps, knee=torch.tensor([0.0, 0.0, sharpness]))


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("sharpness", [1.0, 3.0, 8.0])
def test_rows_of_zeros_have_no_gradient(eps: float, sharpness: float) -> None:
    x = torch.zeros(1, 2, 3, 16, requires_grad=True)
    one(x, shaped(eps, sharpness)).sum().backward()
    assert x.grad is not None
    assert not x.grad.any()


def test_the_operator_is_one_of_torch() -> None:
    x, angles = torch.randn(1, 4, 5, 16), torch.ones(1, 5, 8)
    values = (x, "rms", torch.ones(16), None, 1e-6, torch.tensor([1.0, 2.0, 8.0]), angles, angles, False)
    operator = build.overload("norm_rope")
    assert [argument.name for argument in operator._schema.arguments] == [*norm_rope.FIELDS]
    opcheck(operator, values, test_utils="test_schema")


def test_a_plain_norm_has_the_bits_of_one_without_a_knee() -> None:
    x = torch.randn(1, 2, 3, 16)
    assert torch.equal(one(x, Norm("rms", knee=torch.tensor([0.0, 0.0, 1.0]))), one(x, Norm("rms")))


@pytest.mark.parametrize(("kind", "size", "sharpness"), covering(["rms", "layer", "l2"], [1e-18, 1e18], [1, 6, 8]))
def test_rows_of_any_size_are_within_the_budget(kind: str, size: float, sharpness: float) -> None:
    x, norm = size * torch.randn(1, 2, 3, 40), shaped(1e-37, sharpness)._replace(kind=kind)
    exact, eager = (reference.norm_rope_one(heads, norm, None) for heads in (x.double(), x))
    assert_within_budget(one(x, norm), exact, eager, kind)


def test_a_row_of_zeros_stays_zero_and_nan_stays_nan() -> None:
    x = torch.zeros(1, 1, 2, 16)
    x[..., 1, 3] = torch.nan
    got = one(x, Norm("rms"))
    assert not got[..., 0, :].any()
    assert got[..., 1, :].isnan().any()


WRONG = [
    ({"kind": "lp"}, "kind must be none, rms, layer or l2, got lp"),
    ({"eps": -1.0}, "eps must not be negative"),
    ({"eps": float("nan")}, "eps must not be negative"),
    ({"knee": torch.ones(2)}, "knee must be"),
    ({"gain": torch.ones(3)}, "gain must be"),
    ({"bias": torch.ones(2, 16, 1)}, "bias must be"),
    ({"cos": torch.ones(1, 3, 4)}, "cos and sin must be given together"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG, ids=[message for _, message in WRONG])
def test_the_operator_refuses_what_does_not_fit(changed: dict[str, object], message: str) -> None:
    right = dict.fromkeys(norm_rope.FIELDS) | {"x": torch.zeros(1, 2, 3, 16), "kind": "rms"}
    right |= {"eps": 1e-6, "interleaved": False}
    build.overload("norm_rope")(*right.values())
    with pytest.raises(ValueError, match=message):
        build.overload("norm_rope")(*(right | changed).values())


@pytest.mark.parametrize("norm", [Norm("lp", p=3.0), Norm("unknown")])
def test_other_norms_are_left_to_torch(norm: Norm) -> None:
    x, taken = torch.zeros(2, 2, 1, 16), Norm("rms", torch.ones(2, 16), torch.ones(16))
    assert is_taken(x, taken)
    assert not is_taken(x, norm)
    assert not is_taken(x.double(), taken)
    assert not is_taken(x.to("meta"), taken)
    assert not is_taken(torch.zeros(1, 2, 1, 300), Norm("rms"))


@pytest.mark.parametrize("shape", [(3, 1, 4), (1, 2, 4), (1, 1, 9), (1, 4)], ids=str)
def test_angles_that_do_not_fit_are_left_to_torch(shape: tuple[int, ...]) -> None:
    """PyTorch broadcasts them, or raises its own error."""
    x, cos = torch.zeros(2, 2, 1, 16), torch.ones(shape)
    assert is_taken(x, Norm("rms"), Rotary(torch.ones(1, 1, 4), torch.ones(1, 1, 4)))
    assert not is_taken(x, Norm("rms"), Rotary(cos, cos))


@pytest.fixture
def calls(monkeypatch) -> list[Tensor]:
    """The queries of each call."""
    found: list[Tensor] = []
    inner = norm_rope.norm_rope
    monkeypatch.setattr(norm_rope, "norm_rope", lambda heads: found.append(heads.q) or inner(heads))
    return found


def model(scheme: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    return patch_model(LlamaForCausalLM(config), scheme).eval()


def step(model: LlamaForCausalLM) -> None:
    """Eight tokens, and a step of generation."""
    ids = torch.arange(9)[None]
    with torch.no_grad():
        model(ids[:, 8:], **{CACHE: model(ids[:, :8], use_cache=True)[CACHE]})


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # renamed in v6
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("scheme", "backend"),
    [("qk_norm", "sdpa"), ("q_norm", "eager"), ("qk_norm_cap", "hf_qknorm"), ("qk_norm_cap", "hf_qknorm_tiled")],
)
def test_models_take_it_on_every_backend(scheme, backend, checkpointing, calls, monkeypatch):
    """In training, under checkpointing and in generation: one arithmetic."""
    made, ids = model(scheme), torch.arange(9)[None]
    made.set_attn_implementation(backend)
    with monkeypatch.context() as without:
        without.setenv(build.SWITCH, "0")
        wanted = made(ids, labels=ids)
        wanted.loss.backward()
        gradients = {name: x.grad.clone() for name, x in made.named_parameters()}
    assert not calls
    made.zero_grad()
    if checkpointing:
        made.train().gradient_checkpointing_enable()
    got = made(ids, labels=ids)
    got.loss.backward()
    assert len(calls) == (4 if checkpointing else 2)
    torch.testing.assert_close(got.logits, wanted.logits)
    for name, x in made.named_parameters():
        torch.testing.assert_close(x.grad, gradients[name], msg=name)
    calls.clear()
    made.eval()
    with torch.no_grad():
        assert torch.equal(made(ids, use_cache=True).logits, got.logits)
        last = made(ids[:, 8:], **{CACHE: made(ids[:, :8])[CACHE]}).logits
    assert [q.shape[2] for q in calls] == [9, 9, 8, 8, 1, 1]
    torch.testing.assert_close(last[:, 0], got.logits[:, -1], atol=1e-5, rtol=1e-5)


def test_hooks_before_norms_see_their_inputs(calls):
    made, ids, seen = model("qk_norm_cap"), torch.arange(9)[None], []
    expected = made(ids).logits
    norm = made.model.layers[0].self_attn.q_norm
    norm.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].shape))
    calls.clear()
    assert torch.equal(made(ids).logits, expected)
    assert seen == [(1, 9, 4, 16)]
    norm.register_forward_pre_hook(lambda module, arguments: (2 * arguments[0],))
    assert not torch.equal(made(ids).logits, expected)
    assert len(calls) == 4
