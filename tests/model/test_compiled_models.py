"""torch.compile traces a patched model into one graph, without a break, and computes the same."""

import math
import shutil

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import PreTrainedModel

from hf_qknorm import patch_model, set_knee
from qknorm_tests.tables import TRIED, assert_near, make_batch, randomise, sharp_model

MODELS = [("gpt2", "qkv_norm"), ("gemma2", "soft_cap"), ("llama", "lp"), ("mixtral", "qk_norm_cap"), ("phi3", "none")]
TOLERANCE = 1e-5

pytestmark = [
    pytest.mark.costly,
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),  # torch's own
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()


def outcome(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits and every gradient of their mean square. The loss of the model itself warns, in GPT-2, and so breaks."""
    model.zero_grad()
    logits = model(**batch, use_cache=False).logits
    logits.square().mean().backward()
    return {"logits": logits.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        if value.abs().max() > 1e-6:  # a bias that softmax cannot see has a gradient of rounding errors alone
            assert_near(actual[name], value, TOLERANCE, name)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "preset"), MODELS)
def test_one_graph(model_type, preset):
    """In double precision: terms that cancel in a gradient are added up in another order."""
    layers = {"num_hidden_layers": 1} if model_type == "mixtral" else {}  # the trace of its experts takes long
    model = randomise(patch_model(sharp_model(model_type, **layers), preset)).double()
    if model_type == "mixtral":  # the default's backward has no trace on the CPU in older transformers
        model.set_experts_implementation("batched_mm")
    batch = make_batch("left", labels=False)
    expected = outcome(model, batch)
    model.compile(backend="aot_eager", fullgraph=True)
    assert_same(outcome(model, batch), expected)


@pytest.mark.slow
@torch.no_grad()
def test_one_graph_serves_every_knee():
    """A knee that changes in place leaves all guards as they are."""
    model = randomise(patch_model(sharp_model("llama", num_hidden_layers=1), TRIED["knee"]))
    batch = {**make_batch("left", labels=False), "use_cache": False}
    counter, found = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for knee in (4.0, 0.5, math.inf, 0.0):
        set_knee(model, knee)
        found.append(compiled(**batch).logits)
        assert_near(found[-1], model(**batch).logits, TOLERANCE)
    assert counter.frame_count == 1
    assert not any(torch.allclose(x, found[0], atol=1e-3) for x in found[1:])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor on the CPU needs a C++ compiler")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="what inductor writes needs AVX2")
def test_inductor_with_backward():
    model = randomise(patch_model(sharp_model("llama"), "qk_norm_cap"))
    batch = make_batch("plain", labels=False)
    expected = outcome(model, batch)
    model.compile(fullgraph=True)
    assert_same(outcome(model, batch), expected)
