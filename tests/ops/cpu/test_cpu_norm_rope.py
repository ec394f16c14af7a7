"""Norm and RoPE in C++: within the error budget, with their gradients, and taken by models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_qknorm import patch_model
from hf_qknorm.attend import cpu_kernels
from hf_qknorm.families.style import CACHE
from hf_qknorm.model.install import as_unpatched
from hf_qknorm.ops import reference
from hf_qknorm.ops.cpu import attention, norm_rope
from hf_qknorm.ops.registration import flatten_norms
from hf_qknorm.ops.trust import first_use
from hf_qknorm.ops.trust.code_path import CodePath
from hf_qknorm.ops.types import Heads, LayerCache, Norm, Options, Rotary, Visible
from qknorm_tests.covering import covering
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.norm_cases import CASES, DEVICE, Case, draw, expected, gradients_like

LONG = Case(head_dim=64, length=600, batch=2, heads=(4, 2))  # so many rows that threads share them
LONGER = [LONG._replace(norms=(kind, "rms")) for kind in ("rms", "layer", "l2")]
TAKEN = [case._replace(factor=1.0) for case in (*CASES, *LONGER) if "lp" not in case.norms and case.blend is None]
NORMED = Norm("rms", torch.ones(16))


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


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the cases are drawn on the GPU")
@pytest.mark.parametrize("case", TAKEN, ids=str)
def test_keys_and_values_are_written_behind_those_of_a_cache(case: Case) -> None:
    call = draw(case)
    wanted = norm_rope.norm_rope(heads := Heads(call.q, call.k, call.k + 1, call.q_norm, call.k_norm, call.rotary))
    before = call.k.new_ones((*call.k.shape[:2], 3, case.head_dim))
    into = LayerCache(*(torch.cat([before, torch.zeros_like(call.k)], 2) for _ in range(2)))
    again = LayerCache(into.keys.clone(), into.values.clone())
    queries = norm_rope.append(heads, into)
    assert torch.equal(queries, wanted[0])
    for got, new in ((into.keys, wanted[1]), (into.values, heads.v)):
        assert torch.equal(got, torch.cat([before, new], 2))
    options, visible = Options(0.3, 5.0, causal=True, window=4), Visible(sinks=torch.randn(call.q.shape[1]))
    attended = attention.attend(Heads(queries, *into[:2]), visible, options)
    assert torch.equal(norm_rope.step(heads, again, visible, options), attended)
    assert all(map(torch.equal, again[:2], into[:2]))


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("sharpness", [1, 8])
def test_rows_of_zeros_have_no_gradient(eps: float, sharpness: int) -> None:
    x = torch.zeros(1, 2, 3, 16, requires_grad=True)
    norm_rope.norm_rope_one(x, Norm("rms", eps=eps, sharpness=sharpness), None).sum().backward()
    assert x.grad is not None
    assert not x.grad.any()


def test_the_operator_is_one_of_torch() -> None:
    q, k = (torch.randn(1, heads, 5, 16, requires_grad=True) for heads in (4, 2))
    fields = {"q": q, "k": k, **flatten_norms(NORMED, NORMED, Rotary(torch.ones(1, 5, 8), torch.zeros(1, 5, 8)))}
    operator = norm_rope.CPU_NORM_ROPE
    torch.library.opcheck(operator.overload, operator.arguments(fields))


@pytest.mark.parametrize("norm", [Norm("lp"), Norm("rms", torch.ones(3))], ids=["lp", "gain"])
def test_what_does_not_fit_is_refused(norm: Norm) -> None:
    x = torch.zeros(1, 2, 3, 16, requires_grad=True)
    with pytest.raises(ValueError, match=r"do not take q \[1, 2, 3, 16\] in torch.float32 with"):
        norm_rope.norm_rope_one(x, norm, None)


@pytest.mark.parametrize(("kind", "size", "sharpness"), covering(["rms", "layer", "l2"], [1e-18, 1e18], [1, 8]))
def test_rows_of_any_size_are_within_the_budget(kind, size, sharpness):
    x = size * torch.randn(1, 2, 3, 40)
    got, eager, exact = (
        function(heads, Norm(kind, eps=1e-37, sharpness=sharpness), None)
        for function, heads in (
            (norm_rope.norm_rope_one, x),
            (reference.norm_rope_one, x),
            (reference.norm_rope_one, x.double()),
        )
    )
    assert_within_budget(got, exact, eager, kind)


def test_a_row_of_zeros_stays_zero_and_nan_stays_nan():
    x = torch.zeros(1, 1, 2, 16)
    x[..., 1, 3] = torch.nan
    got = norm_rope.norm_rope_one(x, Norm("rms"), None)
    assert not got[..., 0, :].any()
    assert got[..., 1, :].isnan().any()


OTHERS = [Norm("lp", p=3.0), Norm("rms", blend=torch.zeros(())), Norm("unknown")]
for shape in ((3,), (3, 16), (2, 8), (2, 16, 1)):
    OTHERS += [Norm("rms", torch.ones(shape)), Norm("rms", None, torch.ones(shape))]


@pytest.mark.parametrize("norm", OTHERS)
def test_other_norms_are_left_to_torch(norm):
    x, taken = torch.zeros(2, 2, 1, 16), Norm("rms", torch.ones(2, 16), torch.ones(16))
    assert norm_rope.takes(x, taken, None)
    assert not norm_rope.takes(x, norm, None)
    assert not norm_rope.takes(x.double(), taken, None)
    assert not norm_rope.takes(x.to("meta"), taken, None)


@pytest.mark.parametrize("norm", [Norm(), NORMED])
@pytest.mark.parametrize(("dtype", "columns"), [(torch.float32, 16), (torch.float64, 16), (torch.float32, 300)])
def test_steps_that_it_does_not_take_are_left_to_torch(dtype, columns, norm):
    q, k = (torch.zeros(1, heads, 1, columns, dtype=dtype) for heads in (4, 2))
    taken = dtype == torch.float32 and columns == 16
    with torch.no_grad():
        assert cpu_kernels.serves_append(Heads(q, k, k, norm, norm)) == taken


@pytest.mark.parametrize("shape", [(3, 1, 4), (1, 2, 4), (1, 1, 9), (1, 4)], ids=str)
def test_angles_that_do_not_fit_are_left_to_torch(shape):
    """PyTorch broadcasts them, or raises its own error."""
    x, cos = torch.zeros(2, 2, 1, 16), torch.ones(shape)
    assert norm_rope.takes(x, Norm("rms"), Rotary(torch.ones(1, 1, 4), torch.ones(1, 1, 4)))
    assert not norm_rope.takes(x, Norm("rms"), Rotary(cos, cos))
    with torch.no_grad():
        assert not cpu_kernels.serves_norm_rope(x, Norm("rms"), Rotary(cos, cos))


@pytest.fixture
def unchecked(monkeypatch):
    """No verdict of this process or of the disk, and no demand."""
    monkeypatch.delenv(cpu_kernels.SWITCH, raising=False)
    monkeypatch.setattr(first_use, "_reasons", {})
    monkeypatch.setattr(cpu_kernels, "_served", set())
    monkeypatch.setattr(first_use.verdict_files, "read", lambda *_: None)
    monkeypatch.setattr(first_use.verdict_files, "write", lambda *_: None)
    first_use._warned.cache_clear()
    yield
    first_use._warned.cache_clear()


def served(norm: Norm) -> bool:
    with torch.no_grad():
        return cpu_kernels.serves_norm_rope(torch.zeros(1, 2, 3, 16), norm, None)


@pytest.mark.parametrize("kind", ["rms", "layer", "l2", "none"])
def test_a_right_kernel_passes_its_check(kind, unchecked):
    assert served(Norm(kind, torch.ones(16)))
    ((found, reason),) = first_use._reasons.items()
    assert "cpu_norm_rope" in found
    assert reason is None
    first_use._reasons.clear()
    assert served(Norm(kind, torch.ones(16)))
    assert not first_use._reasons  # it is not asked again
    with torch.enable_grad():  # its gradients are checked as well
        assert cpu_kernels.serves_norm_rope(torch.zeros(1, 2, 3, 16), Norm(kind, torch.ones(16)), None)
    assert [CodePath.of(key[2:]).gradient for key in first_use._reasons] == [kind != "none"]


def test_a_wrong_kernel_is_found_at_its_first_call(unchecked, monkeypatch, caplog):
    inner = norm_rope.norm_rope_one
    monkeypatch.setattr(norm_rope, "norm_rope_one", lambda *given: 1.001 * inner(*given))
    assert not served(Norm("rms"))
    (record,) = caplog.records
    assert "the queries has a relative error" in record.getMessage()
    assert "PyTorch norms and rotates instead" in record.getMessage()
    monkeypatch.setenv(cpu_kernels.SWITCH, "1")
    with pytest.raises(RuntimeError, match="HF_QKNORM_CPU=1 demands"):
        served(Norm("rms"))


@pytest.fixture
def calls(monkeypatch) -> list[Tensor]:
    """The queries of each call."""
    found: list[Tensor] = []
    whole, append, step = norm_rope.norm_rope, norm_rope.append, norm_rope.step
    monkeypatch.setattr(norm_rope, "norm_rope", lambda heads: found.append(heads.q) or whole(heads))
    monkeypatch.setattr(norm_rope, "append", lambda heads, into: found.append(heads.q) or append(heads, into))
    monkeypatch.setattr(norm_rope, "step", lambda heads, *rest: found.append(heads.q) or step(heads, *rest))
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


@pytest.mark.parametrize("scheme", ["qk_norm", "q_norm"])
def test_models_on_sdpa_take_it_for_a_step_of_generation(scheme, calls):
    made, ids = model(scheme), torch.arange(9)[None]
    step(made)  # the first one checks the kernel
    calls.clear()
    with_gradients = made(ids).logits
    with torch.no_grad():
        assert torch.equal(made(ids, use_cache=True).logits, with_gradients)
        cache = made(ids[:, :8])[CACHE]
        assert not calls
        last = made(ids[:, 8:], **{CACHE: cache}).logits
        assert len(calls) == 2
        torch.testing.assert_close(last[:, 0], with_gradients[:, -1], atol=1e-5, rtol=1e-5)
        with as_unpatched(made):
            made(ids[:, 8:], **{CACHE: cache})
        assert len(calls) == 2


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # renamed in v6
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("backend", ["hf_qknorm", "hf_qknorm_cpu"])
def test_models_on_own_attention_take_it_for_all_inputs(backend, checkpointing, calls):
    made, ids = model("qk_norm_cap"), torch.arange(9)[None]
    made.set_attn_implementation("hf_qknorm_eager")
    calls.clear()
    wanted = made(ids, labels=ids)
    wanted.loss.backward()
    gradients = {name: x.grad.clone() for name, x in made.named_parameters()}
    assert not calls
    made.zero_grad()
    made.set_attn_implementation(backend)
    if checkpointing:
        made.train().gradient_checkpointing_enable()
    got = made(ids, labels=ids)
    got.loss.backward()
    assert len(calls) == (4 if checkpointing else 2)
    torch.testing.assert_close(got.logits, wanted.logits)
    for name, x in made.named_parameters():
        torch.testing.assert_close(x.grad, gradients[name], msg=name)
    with torch.no_grad():
        assert torch.equal(made(ids).logits, got.logits)


def test_models_without_norms_run_their_own_rope_on_attention_of_others(calls):
    made = model("soft_cap")
    step(model("none"))
    made.set_attn_implementation("eager")
    step(made)
    assert not calls
    made.set_attn_implementation("hf_qknorm")
    step(made)
    assert [q.shape[2] for q in calls] == [1, 1]


def test_hooks_of_norms_are_called(calls):
    made, seen = model("qk_norm"), []
    calls.clear()
    made.model.layers[0].self_attn.q_norm.register_forward_hook(lambda *args: seen.append(args))
    step(made)
    assert len(seen) == 2
    assert len(calls) == 1  # of the other layer


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
