"""Liger: its kernels on patched models as on their base types, in any order, with norms and caps kept."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from hf_qknorm import Scheme
from hf_qknorm.families import FAMILIES, known_families
from hf_qknorm.families.class_names import TYPE_PREFIX, classes_of
from qknorm_tests.children import child
from qknorm_tests.tables import assert_near
from qknorm_tests.tiny_towers import tiny_towers

pytest.importorskip("liger_kernel")
pytest.importorskip("triton")

from liger_kernel.transformers import AutoLigerKernelForCausalLM, _apply_liger_kernel_to_instance
from liger_kernel.transformers.model import output_classes

from qknorm_tests.liger_kernels import TABLE, interpreted, replaced, without_traces
from qknorm_tests.liger_models import (
    DEVICE,
    TOLERANCE,
    assert_same_step,
    logits,
    patch,
    patched,
    scheme_of,
    step,
    tokens,
    unpatched,
)

# With transformers 5.23, Liger 0.8.5 imports a name for it that it does not define.
BROKEN = {"qwen3_5_moe_text"} if not hasattr(output_classes, "LigerQwen3_5MoeCausalLMOutputWithPast") else set()
KNOWN = [name for name in known_families() if name in TABLE and "AutoModelForCausalLM" in classes_of(name)]
# With transformers 5.23, Liger 0.8.5 computes another training loss of it, patched or not.
OTHER_LOSS = "mllama_text_model"
TYPES = [model_type for model_type in KNOWN if model_type not in {*BROKEN, OTHER_LOSS}]
# Their kernels for experts take long to interpret.
SLOW = {"deepseek_v2", "deepseek_v3", "hunyuan_v1_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"}

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
    """Compute with every type that is not slow, and rotate one of each style; all with `--all-families` or a GPU."""
    every = metafunc.config.getoption("--all-families") or DEVICE == "cuda"
    if "computed" in metafunc.fixturenames:
        metafunc.parametrize("computed", [t for t in TYPES if every or t not in SLOW])
    if "rotated" in metafunc.fixturenames:
        rotated = [t for t in TYPES if "rope" in inspect.signature(TABLE[t]).parameters]
        styles = {FAMILIES[t].style: t for t in reversed(rotated) if t not in {*SLOW, "mixtral"}}
        metafunc.parametrize("rotated", rotated if every else sorted(styles.values()))


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
    lost = logits(unpatched(computed))
    assert float((lost - expected["logits"]).norm() / lost.norm()) > 100 * TOLERANCE


def test_ligers_rope_leaves_the_results_as_they_are(rotated):
    expected = step(patched(rotated))
    assert_same_step(step(apply_to_base(patched(rotated))), expected)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi3", "qwen3"])
def test_a_model_with_liger_is_patched_and_keeps_its_kernels(model_type):
    expected = step(patched(model_type))
    model = apply_to_base(unpatched(model_type))
    kernels = replaced(model)
    patch(model, scheme_of(model_type))
    assert replaced(model) == kernels
    assert_same_step(step(model), expected)


@pytest.mark.parametrize("first", ["liger", "patch"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi3"])
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


SCHEMES = [
    *("soft_cap", "qk_norm", "qkv_norm", "q_norm", "henry", "lp", "none"),
    Scheme(q="rms", k="rms", gain="none"),
    Scheme(q="layer", k="layer", v="layer"),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_scheme_under_ligers_kernels_and_rope(scheme):
    """Liger's RoPE writes into its inputs: no norm may need them in its backward."""
    expected = step(patched(scheme=scheme))
    assert_same_step(step(apply_to_base(patched(scheme=scheme))), expected)


@pytest.mark.parametrize("scheme", ["qk_norm_cap", "qkv_norm"])
def test_the_tower_of_a_multimodal_model(scheme):
    """Below the head: with transformers 5.24, Liger 0.8.5's forward of the whole model demands images."""

    @torch.no_grad()
    def states(model: Any) -> torch.Tensor:
        return model.eval().model(input_ids=tokens()).last_hidden_state

    expected = states(patch(tiny_towers("llava").to(DEVICE), scheme))
    model = liger(patch(tiny_towers("llava").to(DEVICE), scheme))
    assert "model.language_model.norm" in replaced(model)
    assert ("model.language_model.layers.0.input_layernorm" in replaced(model)) == (scheme == "qk_norm_cap")
    assert_near(states(model), expected, TOLERANCE)


def test_head_norms_are_never_replaced():
    from liger_kernel.transformers import monkey_patch

    model = patched()
    norm = model.model.layers[0].self_attn.q_norm
    monkey_patch._patch_rms_norm_module(norm)
    assert "forward" not in vars(norm)
    monkey_patch._patch_rms_norm_module(model.model.norm)
    assert replaced(model) == {"model.norm": "LigerRMSNorm.forward"}


def test_saving_and_loading(tmp_path):
    with without_traces():
        model = liger(patched())
        expected = logits(model)
        model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).to(DEVICE)
    assert list(again.state_dict()) == list(model.state_dict())
    assert_near(logits(again), expected, TOLERANCE)
    again = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, swiglu=False).to(DEVICE)
    kinds = {type(module).__name__ for module in again.modules()}
    assert {"QKNormLlamaAttention", "HeadNorm", "LigerRMSNorm", "LlamaMLP"} <= kinds
    assert type(again).forward.__module__ == "liger_kernel.transformers.model.llama"
    assert_near(logits(again), expected, TOLERANCE)


def arguments(folder: Any, **settings: Any) -> TrainingArguments:
    common = {"report_to": [], "max_steps": 2, "per_device_train_batch_size": 2, "use_cpu": DEVICE == "cpu"}
    return TrainingArguments(folder, **common, **settings)


def train(model: Any, folder: Any, **settings: Any) -> tuple[list[float], float]:
    """The losses of two steps, and the loss of an evaluation."""
    rows = [{"input_ids": row, "labels": row} for row in tokens().cpu()] * 2
    trainer = Trainer(model, arguments(folder, logging_steps=1, **settings), train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_loss"]


def with_lora(model: PreTrainedModel) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, modules_to_save=["q_norm", "k_norm"], init_lora_weights=True))


@pytest.mark.parametrize("wrap", [lambda model: model, with_lora], ids=["whole", "lora"])
def test_trainer_applies_its_liger_config(wrap: Callable[[Any], Any], tmp_path):
    torch.manual_seed(0)
    losses, evaluated = train(wrap(patched()), tmp_path)
    torch.manual_seed(0)
    model = wrap(patched())
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


def test_a_type_without_ligers_kernels_says_so(caplog, tmp_path):
    assert "gpt2" not in TABLE
    with caplog.at_level(logging.WARNING, "hf_qknorm"):
        train(patched("gpt2"), tmp_path, use_liger_kernel=True)
    assert "Liger has no kernels for models of type gpt2" in caplog.text


@pytest.mark.parametrize("imports", ["liger_kernel.transformers.monkey_patch, hf_qknorm", "hf_qknorm"])
def test_ligers_table_knows_every_family_in_either_order(imports, tmp_path):
    script = (
        f"import sys, {imports}\n"
        f"print({imports!r} != 'hf_qknorm' or 'liger_kernel' not in sys.modules)\n"
        "from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as table\n"
        "from hf_qknorm.families import FAMILIES, known_families\n"
        "print(all(f'qknorm_{name}' in table for name in known_families()))\n"
    )
    assert child(script, home=tmp_path) == "True\nTrue\n"


def test_rope_is_left_to_the_patched_attention_unless_asked_for():
    for model_type in KNOWN:
        accepted = inspect.signature(TABLE[model_type]).parameters
        derived = inspect.signature(TABLE[f"qknorm_{model_type}"]).parameters
        assert list(derived) == list(accepted)
        assert "rope" not in derived or derived["rope"].default is False
    model = liger(patched(), rope=True)
    assert modelling_file(model).apply_rotary_pos_emb.__module__.startswith("liger_kernel.")
