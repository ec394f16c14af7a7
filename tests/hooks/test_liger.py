"""Liger: its kernels on patched models as on their base types, in any order, with norms and caps kept."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments

from hf_qknorm import Scheme, patch_model
from hf_qknorm.families import FAMILIES, known_families
from hf_qknorm.families.class_names import TYPE_PREFIX, classes_of
from qknorm_tests.tables import applies, assert_near, randomise, sharp_model
from qknorm_tests.tiny import TINY
from qknorm_tests.tiny_towers import tiny_towers

pytest.importorskip("liger_kernel")
pytest.importorskip("triton")

from liger_kernel.transformers import AutoLigerKernelForCausalLM, _apply_liger_kernel_to_instance
from liger_kernel.transformers.model import output_classes

from qknorm_tests.liger_kernels import TABLE, interpreted, replaced, without_traces

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-4  # relative, fp32: Liger's kernels sum in another order
# With transformers 5.23, Liger 0.8.5 imports a name for it that it does not define.
BROKEN = {"qwen3_5_moe_text"} if not hasattr(output_classes, "LigerQwen3_5MoeCausalLMOutputWithPast") else set()
KNOWN = [name for name in known_families() if name in TABLE and "AutoModelForCausalLM" in classes_of(name)]
# With transformers 5.23, Liger 0.8.5 computes another training loss of it, patched or not.
OTHER_LOSS = "mllama_text_model"
TYPES = [model_type for model_type in KNOWN if model_type not in {*BROKEN, OTHER_LOSS}]
# Their kernels for experts take long to interpret.
SLOW = {"deepseek_v2", "deepseek_v3", "hunyuan_v1_moe", "mixtral", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"}

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning"),  # peft uses the old name
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),  # as Liger 0.8.5 does
]


@pytest.fixture(autouse=True)
def _liger_stays_inside() -> Iterator[None]:
    for model_type in KNOWN:
        getattr(transformers, classes_of(model_type)["AutoModelForCausalLM"][0])  # its modelling file is imported
    with interpreted(), without_traces():
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Compute with one type of each style, and with all by `--all-families` or on a GPU."""
    every = metafunc.config.getoption("--all-families") or DEVICE == "cuda"
    if "computed" in metafunc.fixturenames:
        styles = {FAMILIES[t].style: t for t in reversed(TYPES) if t not in SLOW}
        metafunc.parametrize("computed", TYPES if every else sorted(styles.values()))


def scheme_of(model_type: str) -> Scheme:
    scheme = Scheme(q="auto", k="auto", gain="per_head", softcap=2.0)
    return scheme if applies(model_type, scheme) else Scheme(softcap=2.0)


def unpatched(model_type: str) -> PreTrainedModel:
    layers = {"num_hidden_layers": 1} if model_type == "mixtral" else {}  # its experts take long to interpret
    model: Any = sharp_model(model_type, **layers)
    return model.to(DEVICE)


def patched(model_type: str = "llama", scheme: Scheme | str | None = None) -> PreTrainedModel:
    return patch(unpatched(model_type), scheme or scheme_of(model_type))


def patch(model: PreTrainedModel, scheme: Scheme | str) -> PreTrainedModel:
    patch_model(model, scheme)
    randomise(model)
    return model


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


def modelling_file(model: Any) -> Any:
    return inspect.getmodule(model.base_class)


def apply_to_base(model: PreTrainedModel) -> PreTrainedModel:
    """Apply the function of the unpatched type, Liger's RoPE included."""
    TABLE[model.config.model_type.removeprefix("qknorm_")](model=model)
    return model


def liger(model: PreTrainedModel, **settings: bool) -> PreTrainedModel:
    _apply_liger_kernel_to_instance(model, **settings)
    return model


@pytest.mark.parametrize("model_type", TYPES)
def test_a_patched_model_gets_the_kernels_of_its_base(model_type):
    model = patched(model_type)
    before = vars(modelling_file(model)).copy()
    kernels = replaced(liger(model))
    assert kernels
    changed = {name for name, x in before.items() if vars(modelling_file(model))[name] is not x}
    renamed = model.config.model_type.startswith(TYPE_PREFIX)  # else Liger takes the model for its base, RoPE included
    assert not (renamed and any("rotary" in name for name in changed))
    assert kernels == replaced(liger(unpatched(model_type)))


def test_kernels_leave_the_results_as_they_are(computed):
    expected = step(patched(computed))
    assert_same_step(step(liger(patched(computed))), expected)
    if "rope" in inspect.signature(TABLE[computed]).parameters:
        assert_same_step(step(apply_to_base(patched(computed))), expected)
    lost = logits(unpatched(computed))
    assert float((lost - expected["logits"]).norm() / lost.norm()) > 100 * TOLERANCE


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_model_with_liger_is_patched_and_keeps_its_kernels(model_type):
    expected = step(patched(model_type))
    model = apply_to_base(unpatched(model_type))
    kernels = replaced(model)
    patch(model, scheme_of(model_type))
    assert replaced(model) == kernels
    assert_same_step(step(model), expected)


@pytest.mark.parametrize(("model_type", "first"), [("llama", "liger"), ("gemma2", "patch")])
def test_ligers_function_for_a_whole_class_before_patching_or_after(model_type, first):
    expected = step(patched(model_type))
    apply = TABLE[model_type]
    if first == "liger":
        apply()
        model = patched(model_type)
    else:
        model = patched(model_type)
        apply()
    assert type(model).forward.__module__.startswith("liger_kernel.")
    assert_same_step(step(model), expected)


SCHEMES = ["qkv_norm", "lp", "none", Scheme(q="layer", k="layer", v="layer")]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
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
    from liger_kernel.transformers import monkey_patch

    model = patched()
    norm = model.model.layers[0].self_attn.q_norm
    monkey_patch._patch_rms_norm_module(norm)
    assert "forward" not in vars(norm)
    monkey_patch._patch_rms_norm_module(model.model.norm)
    assert replaced(model) == {"model.norm": "LigerRMSNorm.forward"}


def test_loading_by_ligers_auto_class(tmp_path):
    expected = patched()
    expected.save_pretrained(tmp_path)
    again = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, swiglu=False).to(DEVICE)
    kinds = {type(module).__name__ for module in again.modules()}
    assert {"QKNormLlamaAttention", "HeadNorm", "LigerRMSNorm", "LlamaMLP"} <= kinds
    assert type(again).forward.__module__ == "liger_kernel.transformers.model.llama"
    assert_near(logits(again), logits(expected), TOLERANCE)


def train(model: Any, folder: Any, **settings: Any) -> tuple[list[float], float]:
    """The losses of two steps, and the loss of an evaluation."""
    rows = [{"input_ids": row, "labels": row} for row in tokens().cpu()] * 2
    common = {"report_to": [], "max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": DEVICE == "cpu"}
    arguments = TrainingArguments(folder, logging_steps=1, **common, **settings)
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_loss"]


def with_lora(model: PreTrainedModel) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, modules_to_save=["q_norm", "k_norm"], init_lora_weights=True))


def test_trainer_applies_its_liger_config(tmp_path):
    torch.manual_seed(0)
    losses, evaluated = train(with_lora(patched()), tmp_path)
    torch.manual_seed(0)
    model = with_lora(patched())
    config = {"rms_norm": False}
    found, found_evaluated = train(model, tmp_path, use_liger_kernel=True, liger_kernel_config=config)
    assert set(replaced(model).values()) == {"lce_forward", "LigerSwiGLUMLP.forward"}
    assert found == pytest.approx(losses, rel=TOLERANCE)
    assert found_evaluated == pytest.approx(evaluated, rel=TOLERANCE)


def test_without_a_gpu_the_reason_is_said(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = patched()
    with pytest.raises(RuntimeError, match="Liger's kernels can't run here.*no GPU.*use_liger_kernel=False"):
        liger(model)
    assert replaced(model) == {}
