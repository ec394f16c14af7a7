"""Which implementation "hf_qknorm" takes, in which order, and that each fallback computes the same."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from hf_qknorm import SCHEMES, patch_model
from hf_qknorm.attend import functions, implementations
from hf_qknorm.families.style import CACHE
from hf_qknorm.ops import flex, library, operators
from hf_qknorm.ops.trust import first_use
from hf_qknorm.ops.types import Call
from qknorm_tests.operator_calls import call
from qknorm_tests.slow import slow_but
from qknorm_tests.tables import assert_near, make_batch, randomise, sharp_model

Q = torch.zeros(1, 2, 9, 16)


def choose(*heads: Tensor, **options: Any) -> implementations.Choice:
    return implementations.choose(Call(*call(*heads, **options)))


OLD = "its compute capability is 7.5"
WRONG = "the self-check failed: the output has a relative error of 5.0e-02, and 2.0e-03 is allowed"


@pytest.fixture
def distrusted(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The operators whose self-check fails. The CPU counts as a GPU: kernels run in the interpreter."""
    operators: set[str] = set()

    def reason(heads: Any, visible: Any, options: Any, operator: str = "attention") -> str | None:
        return WRONG if operator in operators else None

    monkeypatch.setattr(implementations, "device_type", lambda x: "cuda")
    monkeypatch.setattr(functions, "device_type", lambda x: "cuda")
    monkeypatch.setattr(first_use, "why_distrusted", reason)
    monkeypatch.setattr(implementations, "_logged", set())
    return operators


ORDER = [
    ({}, None, set(), None, "its Triton kernels"),
    ({}, None, {"attention"}, None, f"FlexAttention: {WRONG}"),
    ({}, None, {"attention", "flex"}, None, f"tiled in PyTorch: {WRONG}"),
    ({}, None, {"attention"}, "it has no bf16", f"tiled in PyTorch: {WRONG}; it has no bf16"),
    ({}, OLD, set(), None, f"FlexAttention: {OLD}"),
    ({}, OLD, set(), "it has no bf16", f"tiled in PyTorch: {OLD}; it has no bf16"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "not_fused", "wrong", "not_flex", "expected"), ORDER)
def test_the_order(options, not_fused, wrong, not_flex, expected, distrusted, monkeypatch):
    distrusted |= wrong
    monkeypatch.setattr(library, "why_not_fused", lambda *heads: not_fused)
    monkeypatch.setattr(flex, "why_not", lambda *call: not_flex)
    chosen = choose(Q, Q, Q, **options)
    assert str(chosen) == expected
    assert chosen.implementation.words == expected.partition(":")[0]


def test_a_new_implementation_is_one_entry(monkeypatch):
    """For a device where it comes first; the reason against the ones before it is not that of another device."""
    ran = []
    mine = implementations.TILED._replace(words="mine", name="hf_qknorm_mine", run=lambda *call: ran.append(call))
    monkeypatch.setattr(implementations, "IMPLEMENTATIONS", (mine, *implementations.IMPLEMENTATIONS))
    for device in ("cpu", "meta"):
        assert str(choose(*[Q.to(device)] * 3)) == "mine"
    implementations.run(Call(*call(Q, Q, Q)))
    assert len(ran) == 1


def test_the_implementation_is_logged_once_and_not_in_a_trace(distrusted, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "hf_qknorm")
    silent = implementations.TRITON._replace(run=lambda heads, *rest: heads.q)
    monkeypatch.setattr(implementations, "IMPLEMENTATIONS", (silent, *implementations.IMPLEMENTATIONS[1:]))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    implementations.run(Call(*call(Q, Q, Q)))
    assert not caplog.records
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    for rows in (1, 9):
        implementations.run(Call(*call(Q, Q, Q)))
        implementations.run(Call(*call(Q, Q, Q, mask=torch.ones(1, 1, rows, 9, dtype=torch.bool))))
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "hf_qknorm attention runs its Triton kernels"
    assert second.startswith("hf_qknorm attention runs tiled in PyTorch: the mask")


def kernel_model() -> PreTrainedModel:
    pytest.importorskip("triton", reason="needs Triton, which comes with torch on CUDA and with the test extra")
    from qknorm_tests import interpreter

    interpreter.install()
    return randomise(patch_model(sharp_model("llama", num_hidden_layers=1), SCHEMES["qk_norm_cap"]))


def outcome(model: PreTrainedModel, backend: str) -> dict[str, Tensor]:
    """A training step; a prompt and a token with a dynamic and a static cache; a token with gradients over a prompt."""
    model.set_attn_implementation(backend)
    model.zero_grad()
    result = model(**make_batch("left"), use_cache=False)
    result.loss.backward()
    found = {"loss": result.loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}
    tokens = make_batch("plain")["input_ids"][:, :9]
    with torch.no_grad():
        for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=16)):
            for i, piece in enumerate(tokens.split([8, 1], dim=1)):
                found[f"{type(cache).__name__} {i}"] = model(input_ids=piece, **{CACHE: cache}).logits
        cache = model(input_ids=tokens[:, :8])[CACHE]
    found["with gradients"] = model(input_ids=tokens[:, 8:], **{CACHE: cache}).logits.detach()
    return found


FALLBACKS = [
    set(),
    {"attention"},
    {"attention", "flex"},
    {"step", "append"},
    {"step", "append", "norm_rope", "norm_rope_one"},
    {"attention", "step", "append", "norm_rope", "norm_rope_one"},
]


@pytest.mark.slow
def test_each_fallback_computes_the_same(distrusted, monkeypatch):
    model = kernel_model()
    expected = outcome(model, "hf_qknorm_eager")
    ran: list[str] = []
    kernels = {"fused_attention", "fused_step", "norm_rope", "norm_rope_one"}
    for name in kernels - {"fused_attention"}:
        monkeypatch.setattr(library, name, noted(getattr(library, name), name, ran))
    fused = operators.FUSED_ATTENTION
    monkeypatch.setattr(fused, "direct", noted(fused.direct, "fused_attention", ran))
    for wrong in FALLBACKS:
        distrusted.clear()
        distrusted |= wrong
        ran.clear()
        for name, value in outcome(model, "hf_qknorm").items():
            assert_near(value, expected[name], 1e-4, f"{wrong}: {name}")
        sound = kernels - wrong - ({"fused_attention", "norm_rope_one"} if "attention" in wrong else set())
        assert set(ran) == sound - ({"fused_step"} if "step" in wrong else set())


def noted(function: Any, name: str, ran: list[str]) -> Any:
    def run(*arguments: Any) -> Any:
        ran.append(name)
        return function(*arguments)

    return run


@pytest.mark.parametrize(
    "wrong", slow_but(["attention"], ["attention", "norm_rope", "norm_rope_one", "step", "append"])
)
def test_an_explicit_name_raises_with_the_figures(wrong, distrusted):
    model = kernel_model()
    distrusted.add(wrong)
    with pytest.raises(ValueError, match="5.0e-02, and 2.0e-03 is allowed") as caught:
        outcome(model, "hf_qknorm_triton")
    assert 'set_attn_implementation("hf_qknorm")' in str(caught.value)
