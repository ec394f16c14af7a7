"""The causality check leaves no trace, and tells a failing model or backend from a failing patch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from hf_qknorm import patch_model
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.causality import is_causal
from hf_qknorm.model.kernel_attention import QKNormAttention
from hf_qknorm.ops import reference
from qknorm_tests.tables import fingerprint, make_batch, sharp_model
from qknorm_tests.tiny import tiny_model


@pytest.fixture
def register() -> Iterator[Callable[[Callable[..., Any]], None]]:
    """Register an attention function as "theirs", without a mask function, for the duration of a test."""
    yield lambda function: AttentionInterface.register("theirs", function)
    AttentionInterface._global_mapping.pop("theirs", None)


def count_calls(model: PreTrainedModel) -> None:
    """Make the last norm count its calls, in a buffer and an attribute, and draw a random number."""
    norm: Any = model.model.norm
    forward = norm.forward
    norm.register_buffer("calls", torch.zeros(()))
    norm.last_length = 0

    def counting(x: Tensor) -> Tensor:
        norm.calls += 1
        norm.calls = norm.calls + torch.rand(())
        norm.last_length = x.shape[1]
        return forward(x)

    norm.forward = counting


def test_the_check_leaves_no_trace():
    model = sharp_model("llama").train()
    model.model.layers[0].eval()
    count_calls(model)
    seen: list[Any] = []
    hooks = [model.model.embed_tokens.register_forward_hook(lambda *_: seen.append(1))]
    hooks.append(model.lm_head.register_forward_pre_hook(lambda *_: seen.append(2)))
    before, modes, state = fingerprint(model), [m.training for m in model.modules()], torch.get_rng_state()
    buffers = dict(model.named_buffers())
    assert is_causal(model)
    patch_model(model, "qk_norm")
    assert modes == [m.training for m in model.modules() if type(m).__name__ != "HeadNorm"]
    assert torch.equal(torch.get_rng_state(), state)
    assert not seen
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert model.model.norm.calls == model.model.norm.last_length == 0
    assert fingerprint(model) != before
    model(**make_batch("plain"))
    assert seen == [1, 2]


def test_a_model_that_does_not_run_here_is_patched(caplog):
    model = sharp_model("llama")

    def fail(x: Tensor) -> Tensor:
        raise NotImplementedError("these kernels need a GPU\nand more")

    model.model.norm.forward = fail
    with caplog.at_level(logging.WARNING, "hf_qknorm"):
        patch_model(model, "qk_norm")
    assert len(patched_layers(model)) == 2
    assert caplog.messages == [
        "patched, but whether it is causal is not checked: its forward failed here before it was patched too "
        "(NotImplementedError: these kernels need a GPU)"
    ]


def test_a_backend_that_does_not_run_here_is_kept(register, caplog):
    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("FlashAttention needs a GPU")

    register(fail)
    with caplog.at_level(logging.WARNING, "hf_qknorm"):
        model = patch_model(sharp_model("llama"), "qk_norm", attn_implementation="theirs")
    assert model.config._attn_implementation == "theirs"
    assert caplog.messages == [
        "patched, but whether it is causal is not checked: attn_implementation='theirs' does not run here "
        "(RuntimeError: FlashAttention needs a GPU)"
    ]


@pytest.mark.parametrize("switched", [False, True])
def test_a_backend_that_loses_causality_is_refused(switched, register):
    def blind(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        result = reference.attention(query, key, value, scale=options["scaling"])
        return result.out.transpose(1, 2).contiguous(), None

    register(blind)
    model = sharp_model("llama")
    if switched:  # the model is not causal before it is patched either
        model.set_attn_implementation("theirs")
    before = fingerprint(model)
    with pytest.raises(RuntimeError, match="'theirs' a later token changes earlier outputs"):
        patch_model(model, "qk_norm", attn_implementation=None if switched else "theirs")
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [("gemma3_text", {"use_bidirectional_attention": True}), ("llama", {"is_causal": False})],
)
def test_a_bidirectional_model_is_patched(model_type, settings, caplog):
    model = sharp_model(model_type, **settings)
    model.set_attn_implementation("eager")
    assert not is_causal(model)
    assert not is_causal(patch_model(model, "soft_cap"))
    assert not caplog.records


def test_a_patch_that_breaks_the_forward_is_undone(monkeypatch):
    def fail(*args: Any, **options: Any) -> Any:
        raise ZeroDivisionError("in our code")

    monkeypatch.setattr(QKNormAttention, "_norm_rotate", fail)
    model = sharp_model("llama")
    before = fingerprint(model)
    with pytest.raises(RuntimeError, match="the unpatched model's does not: ZeroDivisionError: in our code"):
        patch_model(model, "qk_norm_cap")
    assert fingerprint(model) == before


def test_nan_outputs_do_not_count_as_lost_causality():
    model = tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 0})
    patch_model(model, "qk_norm_cap")
    assert model(torch.arange(8)[None]).logits.isnan().all()
