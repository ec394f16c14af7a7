"""Norm and RoPE in Triton's kernel in front of every attention function: patched models against the unfused path."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from qknorm_tests.covering import covering
from qknorm_tests.tables import sharp_model

pytest.importorskip("triton", reason="needs Triton, which comes with torch on CUDA and with the test extra")
from hf_qknorm import patch_model
from hf_qknorm.families.style import CACHE
from hf_qknorm.model import raw_heads
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.ops.triton import norm_rope
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.kernel_models import DEVICE, batch, patched

FULL, BRAIN = torch.float32, torch.bfloat16
BACKENDS = ["sdpa", "eager", "hf_qknorm_eager", "hf_qknorm_tiled"]
if DEVICE == "cuda":
    BACKENDS.append("flex_attention")
Results = dict[str, Tensor]


def fuse(monkeypatch: pytest.MonkeyPatch, fused: bool) -> list[str]:
    """Have layers take the kernel for norm and RoPE, as on CUDA, or none; the list gets each pass of the kernel."""
    passes: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(norm_rope, name)

        def call(*arguments: Any, **options: Any) -> Any:
            passes.append(name)
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(raw_heads, "device_type", lambda x: "cuda" if fused else "meta")
    for name in ("forward", "backward"):
        monkeypatch.setattr(norm_rope, name, counted(name))
    return passes


def compare(
    model: Any, dtype: torch.dtype, compute: Callable[[Any], Results], passes: dict[str, int], layers: int
) -> None:
    """Assert that the fused results are within the budget, and that each layer took the kernel's passes."""
    model = model.to(dtype)
    found = []
    for fused, precision in ((False, torch.float64), (False, dtype), (True, dtype)):
        with pytest.MonkeyPatch.context() as monkeypatch:
            seen = fuse(monkeypatch, fused)
            found.append(compute(deepcopy(model).to(precision)))
            expected = [name for name, count in passes.items() for _ in range(count * layers)] if fused else []
            assert sorted(seen) == sorted(expected)
    exact, eager, got = found
    assert got.keys() == exact.keys()
    for name, value in got.items():
        assert_within_budget(value, exact[name], eager[name], name)


def trained(kind: str) -> Callable[[Any], Results]:
    """Logits, and every gradient of a loss, with a model in training."""

    def compute(model: Any) -> Results:
        result = model(**batch(kind), use_cache=False)
        result.loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"logits": result.logits.detach(), **grads}

    return compute


@torch.no_grad()
def generated(model: Any) -> Results:
    """Logits of a prompt and of three single tokens after it, over a cache that grows."""
    tokens = batch("left", labels=False)
    ids, mask, cache, found = tokens["input_ids"], tokens["attention_mask"], DynamicCache(), []
    for start, stop in ((0, 9), (9, 10), (10, 11), (11, 12)):
        given = {"input_ids": ids[:, start:stop], "attention_mask": mask[:, :stop], CACHE: cache}
        found.append(model(**given, use_cache=True).logits[1])  # the row without padding
    return {"logits": torch.cat(found)}


GENERATING = [("llama", "knee"), ("glm", "qk_norm"), ("gpt_neox", "qk_norm")]
KINDS = [("llama", "plain", FULL), ("llama", "right", BRAIN), ("gpt2", "plain", FULL), ("phi3", "plain", BRAIN)]


@pytest.mark.parametrize(("case", "backend"), covering(KINDS, BACKENDS, strength=1), ids=str)
def test_training(case: tuple[str, str, torch.dtype], backend: str) -> None:
    model_type, kind, dtype = case
    model = patched(model_type, "qk_norm")
    model.set_attn_implementation(backend)
    compare(model, dtype, trained(kind), {"forward": 1, "backward": 1}, len(patched_layers(model)))


@pytest.mark.parametrize(
    ("model_type", "scheme", "backend"),
    [(*model, backend) for model, backend in covering(GENERATING, BACKENDS, strength=1)],
)
def test_generation(model_type: str, scheme: str, backend: str) -> None:
    model = patched(model_type, scheme)
    model.set_attn_implementation(backend)
    compare(model.eval(), FULL, generated, {"forward": 4}, len(patched_layers(model)))


def test_models_of_two_families_in_one_process() -> None:
    """Each keeps its own rotation: Llama turns halves of a head, GLM neighbours in a part of it."""
    models = [patched(model_type, "qk_norm").eval() for model_type in ("llama", "glm")]
    for model in (*models, *models):
        model.set_attn_implementation("sdpa")
        compare(model, FULL, evaluated, {"forward": 1}, len(patched_layers(model)))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable:FutureWarning")
def test_gradient_checkpointing() -> None:
    """The forward pass runs twice."""
    model = patched("llama", "qk_norm_cap")
    model.set_attn_implementation("hf_qknorm_tiled")
    model.gradient_checkpointing_enable()
    compare(model.train(), FULL, trained("plain"), {"forward": 2, "backward": 1}, len(patched_layers(model)))


def evaluated(model: Any) -> Results:
    """Logits without gradients."""
    with torch.no_grad():
        return {"logits": model(**batch("plain", labels=False), use_cache=False).logits}


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")  # of transformers
@pytest.mark.parametrize("backend", ["sdpa", "eager", "flex_attention"])
def test_without_gradients(backend: str) -> None:
    """PyTorch's flex attention has no gradients on a CPU; it runs there without its compiler."""
    model = patched("llama", "qk_norm")
    model.set_attn_implementation(backend)
    with torch.compiler.set_stance("force_eager"):
        compare(model, FULL, evaluated, {"forward": 1}, len(patched_layers(model)))


@pytest.mark.parametrize(
    ("model_type", "scheme"), [("llama", "none"), ("deepseek_v3", "soft_cap"), ("qwen3", "soft_cap")]
)
def test_layers_without_norms_of_the_scheme_keep_the_models_own(
    model_type: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sharp_model(model_type, num_hidden_layers=1)
    patch_model(model, scheme, attn_implementation="hf_qknorm_eager")
    seen = fuse(monkeypatch, fused=True)
    model.to(DEVICE)(**batch("plain", labels=False))
    assert not seen
