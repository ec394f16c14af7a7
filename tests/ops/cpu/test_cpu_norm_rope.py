"""Norm and RoPE in C++: within the error budget, and taken by models for steps of generation."""

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
from hf_qknorm.ops.cpu import norm_rope
from hf_qknorm.ops.trust import first_use
from hf_qknorm.ops.types import Norm, Rotary
from qknorm_tests.covering import covering
from qknorm_tests.error_budget import assert_within_budget

HEADS = 3
GAINS = {"shared": (40,), "per_head": (HEADS, 40), "scalar": (1,), "none": None}


def problem(
    kind: str, gain: str, dtype: torch.dtype, batch: int, pairs: int, sharpness: int
) -> tuple[Tensor, Norm, Rotary | None]:
    """Heads `[2, H, 5, 40]` laid out as a projection's, with a row of zeros; a norm; a rotation of some columns.

    The norm's knee is in the middle of the rows' sizes.
    """
    torch.manual_seed(0)
    x = (5 * torch.randn(2, 5, HEADS, 40)).to(dtype)
    x[0, 0] = 0
    shape = GAINS[gain]
    parameters = [None if shape is None else torch.randn(shape).to(dtype) for _ in range(2)]
    angles = torch.randn(batch, 5, 2 * pairs)
    rotary = Rotary(angles.cos()[..., :pairs], angles.sin()[..., ::2], pairs == 8) if pairs else None
    return x.transpose(1, 2), Norm(kind, *parameters, None, torch.tensor(25.0), 2.0, sharpness), rotary


def doubled(norm: Norm, rotary: Rotary | None) -> tuple[Norm, Rotary | None]:
    wide = [x.double() if isinstance(x, Tensor) else x for x in norm]
    return Norm(*wide), None if rotary is None else rotary._replace(cos=rotary.cos.double(), sin=rotary.sin.double())


KINDS = [("rms", 1), ("rms", 2), ("rms", 8), ("layer", 1), ("layer", 4), ("l2", 1), ("l2", 8), ("none", 1)]
SHAPES = [("shared", 1, 20), ("per_head", 2, 8), ("scalar", 2, 0), ("none", 1, 6)]


@pytest.mark.parametrize(("dtype", "norm", "shape"), covering(norm_rope.DTYPES, KINDS, SHAPES), ids=str)
def test_heads_are_within_the_budget(dtype, norm, shape):
    (kind, sharpness), (gain, batch, pairs) = norm, shape
    x, norm, rotary = problem(kind, gain, dtype, batch, pairs, sharpness)
    got = norm_rope.norm_rope_one(x, norm, rotary)
    exact = reference.norm_rope_one(x.double(), *doubled(norm, rotary))
    assert got.shape == x.shape
    assert got.stride() == x.stride()
    assert_within_budget(got, exact, reference.norm_rope_one(x, norm, rotary), kind)


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


@pytest.mark.parametrize(
    "norm", [Norm("lp", p=3.0), Norm("rms", blend=torch.zeros(())), Norm("unknown")], ids=["lp", "blend", "unknown"]
)
def test_other_norms_are_left_to_torch(norm):
    x = torch.zeros(1, 1, 1, 16)
    assert norm_rope.takes(x, Norm("rms"), None)
    assert not norm_rope.takes(x, norm, None)
    assert not norm_rope.takes(x.double(), Norm("rms"), None)
    assert not norm_rope.takes(x.to("meta"), Norm("rms"), None)


@pytest.mark.parametrize("shape", [(3, 1, 4), (1, 2, 4), (1, 1, 9), (1, 4)], ids=str)
def test_angles_that_do_not_fit_are_left_to_torch(shape):
    """PyTorch broadcasts them, or raises its own error."""
    x, cos = torch.zeros(2, 2, 1, 16), torch.ones(shape)
    assert norm_rope.takes(x, Norm("rms"), Rotary(torch.ones(1, 1, 4), torch.ones(1, 1, 4)))
    assert not norm_rope.takes(x, Norm("rms"), Rotary(cos, cos))
    with torch.no_grad():
        assert not cpu_kernels.serves_norm_rope(x, Norm("rms"), Rotary(cos, cos))


@pytest.mark.parametrize("shape", [(3,), (3, 16), (2, 8), (2, 16, 1)], ids=str)
def test_gains_that_do_not_fit_are_left_to_torch(shape):
    x = torch.zeros(2, 2, 1, 16)
    assert norm_rope.takes(x, Norm("rms", torch.ones(2, 16), torch.ones(16)), None)
    assert not norm_rope.takes(x, Norm("rms", torch.ones(shape)), None)
    assert not norm_rope.takes(x, Norm("rms", None, torch.ones(shape)), None)


@pytest.fixture
def unchecked(monkeypatch):
    """No verdict of this process or of the disk, and no demand."""
    monkeypatch.delenv(cpu_kernels.SWITCH, raising=False)
    monkeypatch.setattr(first_use, "_reasons", {})
    monkeypatch.setattr(cpu_kernels, "_served", set())
    monkeypatch.setattr(first_use.verdict_files, "read", lambda *_: None)
    monkeypatch.setattr(first_use.verdict_files, "write", lambda *_: None)
    first_use._warn.cache_clear()
    yield
    first_use._warn.cache_clear()


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
    with torch.enable_grad():
        assert not cpu_kernels.serves_norm_rope(torch.zeros(1, 2, 3, 16), Norm(kind, torch.ones(16)), None)


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
    """The heads of each call."""
    found: list[Tensor] = []
    inner = norm_rope.norm_rope_one
    monkeypatch.setattr(norm_rope, "norm_rope_one", lambda x, *rest: found.append(x) or inner(x, *rest))
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


@pytest.mark.parametrize("scheme", ["qk_norm", "qk_norm_cap", "q_norm"])
def test_models_take_it_for_a_step_of_generation(scheme, calls):
    made, ids = model(scheme), torch.arange(9)[None]
    step(made)  # the first one checks the kernel
    calls.clear()
    with_gradients = made(ids).logits
    with torch.no_grad():
        assert torch.equal(made(ids, use_cache=True).logits, with_gradients)
        cache = made(ids[:, :8])[CACHE]
        assert not calls
        last = made(ids[:, 8:], **{CACHE: cache}).logits
        assert len(calls) == 4
        torch.testing.assert_close(last[:, 0], with_gradients[:, -1], atol=1e-5, rtol=1e-5)
        with as_unpatched(made):
            made(ids[:, 8:], **{CACHE: cache})
        assert len(calls) == 4


def test_models_without_norms_run_their_own_rope(calls):
    step(model("none"))
    step(model("soft_cap"))
    assert not calls


def test_hooks_of_norms_are_called(calls):
    made, seen = model("qk_norm"), []
    calls.clear()
    made.model.layers[0].self_attn.q_norm.register_forward_hook(lambda *args: seen.append(args))
    step(made)
    assert len(seen) == 2
    assert len(calls) == 2  # of the other layer
