"""Liger: its kernels on patched models as on their base types, in any order, with norms and caps kept."""

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from hf_qknorm import Scheme, patch_model
from hf_qknorm.families import known_families
from hf_qknorm.families.class_names import TYPE_PREFIX, classes_of
from qknorm_tests.tables import applies, assert_near, chosen, randomise, sharp_model
from qknorm_tests.tiny import TINY
from qknorm_tests.tiny_towers import tiny_towers

pytest.importorskip("liger_kernel")
pytest.importorskip("triton")

import triton
import triton.language as tl
from liger_kernel.transformers import _apply_liger_kernel_to_instance, monkey_patch
from liger_kernel.transformers.model import output_classes
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import TensorHandle

from qknorm_tests import interpreter

TABLE = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-4  # relative, fp32: Liger's kernels sum in another order
# With transformers 5.23, Liger 0.8.5 imports a name for it that it does not define.
BROKEN = {"qwen3_5_moe_text"} if not hasattr(output_classes, "LigerQwen3_5MoeCausalLMOutputWithPast") else set()
KNOWN = [name for name in known_families() if name in TABLE and "AutoModelForCausalLM" in classes_of(name)]
# With transformers 5.23, Liger 0.8.5 computes another training loss of it, patched or not.
OTHER_LOSS = "mllama_text_model"
TYPES = [model_type for model_type in KNOWN if model_type not in {*BROKEN, OTHER_LOSS}]

_convert_else = triton_interpreter._implicit_cvt


@contextmanager
def interpreted() -> Iterator[None]:
    """Let the interpreter run Liger's kernels; do nothing where kernels are compiled.

    The kernels cast their arguments that are floats, which the interpreter passes as Python's. They call functions of
    CUDA's library, which it lacks. The first setting of a kernel serves: it can't measure which one is fastest.
    """
    if not triton.knobs.runtime.interpret:
        yield
        return
    interpreter.install()
    for module in [module for name, module in sys.modules.items() if name.startswith("liger_kernel.ops.")]:
        for name, value in list(vars(module).items()):
            if isinstance(value, Autotuner):
                value.configs = value.configs[:1]
            elif name in ("rsqrt", "tanh") and "libdevice" in getattr(value, "__module__", ""):
                setattr(module, name, {"rsqrt": _rsqrt, "tanh": _tanh}[name])
    triton_interpreter._implicit_cvt = _convert
    try:
        yield
    finally:
        triton_interpreter._implicit_cvt = _convert_else


def _convert(argument: Any) -> Any:
    if isinstance(argument, float):
        return tl.tensor(TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)
    return _convert_else(argument)


@triton.jit
def _rsqrt(x):
    return tl.rsqrt(x)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@contextmanager
def without_traces() -> Iterator[None]:
    """Restore modelling files and their classes, transformers' activations, and PyTorch's own after the block."""
    files = [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]
    files = [module for module in files if ".modeling_" in module.__name__]
    owners: list[Any] = [*files, nn, nn.functional]
    for file in files:
        owners += [x for x in vars(file).values() if isinstance(x, type) and x.__module__ == file.__name__]
    before = [(owner, dict(vars(owner))) for owner in owners]
    activations = {name: dict.__getitem__(ACT2FN, name) for name in ACT2FN}  # its own `[]` makes a module
    try:
        yield
    finally:
        ACT2FN.update(activations)
        for owner, own in before:
            for name, value in own.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)


def replaced(model: nn.Module) -> dict[str, str]:
    """The modules of a model whose forward Liger has replaced, each with the name of the new one."""
    found = {name: vars(module).get("forward") for name, module in model.named_modules()}
    taken = {name: x for name, x in found.items() if getattr(x, "__module__", "").startswith("liger_kernel.")}
    return {name: forward.__qualname__ for name, forward in taken.items()}


pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),  # as Liger 0.8.5 does
]


@pytest.fixture(autouse=True)
def _liger_stays_inside() -> Iterator[None]:
    for model_type in KNOWN:
        getattr(transformers, classes_of(model_type)["AutoModelForCausalLM"][0])  # its modelling file is imported
    with interpreted(), without_traces():
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Compute with a few types, and with all by `--all-families` or on a GPU."""
    few = TYPES if DEVICE == "cuda" else ["gemma2", "llama", "phi3", "qwen3"]
    if "computed" in metafunc.fixturenames:
        metafunc.parametrize("computed", chosen(metafunc.config, few, TYPES))


def scheme_of(model_type: str) -> Scheme:
    scheme = Scheme(q="auto", k="auto", gain="per_head", softcap=2.0)
    return scheme if applies(model_type, scheme) else Scheme(softcap=2.0)


def unpatched(model_type: str) -> Any:
    return sharp_model(model_type).to(DEVICE)


def patched(model_type: str = "llama", scheme: Scheme | str | None = None) -> PreTrainedModel:
    return patch(unpatched(model_type), scheme or scheme_of(model_type))


def patch(model: PreTrainedModel, scheme: Scheme | str) -> Any:
    return randomise(patch_model(model, scheme))


def tokens() -> Tensor:
    return torch.randint(3, TINY["vocab_size"], (1, 6), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def step(model: PreTrainedModel) -> dict[str, Tensor]:
    """Loss and gradients of a training step, where Liger's loss forms no logits, and the logits of evaluation."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.train()
    model.zero_grad()
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "logits": logits(model), **gradients}


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model.eval()(input_ids=tokens()).logits


def assert_same_step(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare tensors by name; single numbers, each of which may be near zero by chance, together over the layers."""
    assert actual.keys() == expected.keys()
    groups: dict[str, list[str]] = {}
    for name, value in expected.items():
        groups.setdefault(name if value.numel() > 1 else re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    for group, names in groups.items():
        pair = (torch.stack([step[name].detach() for name in names]) for step in (actual, expected))
        assert_near(*pair, TOLERANCE, group)


def apply_to_base(model: Any) -> Any:
    """Apply the function of the unpatched type, Liger's RoPE included."""
    TABLE[type(model.config).base_model_type](model=model)
    return model


def liger(model: PreTrainedModel) -> PreTrainedModel:
    _apply_liger_kernel_to_instance(model)
    return model


@pytest.mark.parametrize("model_type", TYPES)
def test_a_patched_model_gets_the_kernels_of_its_base(model_type):
    """Without RoPE, unless Liger takes the model for its base."""
    model = patched(model_type)
    modelling = vars(inspect.getmodule(type(model).base_class))
    before = modelling.copy()
    kernels = replaced(liger(model))
    assert kernels
    if model.config.model_type.startswith(TYPE_PREFIX):
        assert not any("rotary" in name for name, x in before.items() if modelling[name] is not x)
    assert kernels == replaced(liger(unpatched(model_type)))


def test_kernels_leave_the_results_as_they_are(computed):
    expected = step(patched(computed))
    assert_same_step(step(liger(patched(computed))), expected)
    if "rope" in inspect.signature(TABLE[computed]).parameters:
        assert_same_step(step(apply_to_base(patched(computed))), expected)
    lost = logits(unpatched(computed))
    assert float((lost - expected["logits"]).norm() / lost.norm()) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("model_type", "apply"),
    [("llama", "to the model"), ("llama", "to the class"), ("qwen3", "to the model"), ("gemma2", "to the class later")],
)
def test_ligers_function_before_patching_or_after(model_type, apply):
    """A patched model keeps the kernels."""
    expected = step(patched(model_type))
    if apply == "to the class":
        TABLE[model_type]()
    model = unpatched(model_type)
    if apply == "to the model":
        TABLE[model_type](model=model)
    kernels = replaced(model)
    patch(model, scheme_of(model_type))
    if apply == "to the class later":
        TABLE[model_type]()
    assert replaced(model) == kernels
    assert bool(kernels) != type(model).forward.__module__.startswith("liger_kernel.")
    assert_same_step(step(model), expected)


@pytest.mark.parametrize("scheme", ["qkv_norm", "lp", Scheme(q="layer", k="layer", v="layer")], ids=str)
def test_every_scheme_under_ligers_kernels_and_rope(scheme):
    """Liger's RoPE writes into its inputs: no norm may need them in its backward."""
    expected = step(patched(scheme=scheme))
    assert_same_step(step(apply_to_base(patched(scheme=scheme))), expected)


def test_the_tower_of_a_multimodal_model():
    """Below the head: with transformers 5.24, Liger 0.8.5's forward of the whole model demands images."""

    @torch.no_grad()
    def states(model: Any) -> torch.Tensor:
        return model.eval().model(input_ids=tokens()).last_hidden_state

    expected = states(patch(tiny_towers("llava").to(DEVICE), "qk_norm_cap"))
    model = liger(patch(tiny_towers("llava").to(DEVICE), "qk_norm_cap"))
    assert "model.language_model.norm" in replaced(model)
    assert_near(states(model), expected, TOLERANCE)


def test_head_norms_are_never_replaced():
    model = patched()
    norm = model.model.layers[0].self_attn.q_norm
    monkey_patch._patch_rms_norm_module(norm)
    assert "forward" not in vars(norm)
    monkey_patch._patch_rms_norm_module(model.model.norm)
    assert replaced(model) == {"model.norm": "LigerRMSNorm.forward"}


def test_settings_reach_ligers_function():
    """As those of Trainer's `liger_kernel_config`."""
    _apply_liger_kernel_to_instance(model := patched(), rms_norm=False)
    assert set(replaced(model).values()) == {"lce_forward", "LigerSwiGLUMLP.forward"}


def test_without_a_gpu_the_reason_is_said(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = patched()
    with pytest.raises(RuntimeError, match="Liger's kernels can't run here.*no GPU.*use_liger_kernel=False"):
        liger(model)
    assert replaced(model) == {}
