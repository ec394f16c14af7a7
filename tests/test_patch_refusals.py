"""Models that can't be patched are refused with the reason and a remedy, and stay unchanged."""

import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, MambaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

import hf_qknorm
from hf_qknorm import patch_model
from hf_qknorm.model.derived import QKNormModel
from qknorm_tests.adapters import needs_add_adapter
from qknorm_tests.tables import fingerprint, sharp_model
from qknorm_tests.tiny import TINY

LORA = peft.LoraConfig(r=2, target_modules=["q_proj"])


def refuse(model: Any, *args: Any, **kwargs: Any) -> str:
    """Return the message with which `patch_model` refuses `model`, and check that it leaves the model unchanged."""
    before = fingerprint(model) if hasattr(model, "config") else str(model)
    with pytest.raises(ValueError, match=".") as refusal:
        patch_model(model, *args, **kwargs)
    assert (fingerprint(model) if hasattr(model, "config") else str(model)) == before
    assert not any(isinstance(module, QKNormModel) for module in model.modules())
    return str(refusal.value)


def altered(**attributes: Any) -> Any:
    model = sharp_model("llama")
    vars(model).update(attributes)
    return model


def changed(change: Callable[[Any], object]) -> Any:
    model = sharp_model("llama")
    change(model)
    return model


def replace_attention(model: Any) -> None:
    """As another tool: nothing is left to patch."""
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("FasterAttention", (LlamaAttention,), {})


def replace_forward(model: Any) -> None:
    layer = model.model.layers[1].self_attn
    layer.forward = types.MethodType(other_forward, layer)


def quantise(model: Any) -> None:
    """One layer to integers, as a quantiser may hold them."""
    for part in model.model.layers[1].self_attn.children():
        part.weight = nn.Parameter(part.weight.detach().to(torch.int8), requires_grad=False)


def other_forward(self: nn.Module, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
    return hidden_states, None


# Models that "qk_norm_cap" can't be put on, and words of the refusal.
REFUSED: dict[str, tuple[Any, ...]] = {
    "model type": (
        lambda: AutoModelForCausalLM.from_config(MambaConfig(**TINY)),
        *("mamba", "no softmax attention", "The nearest supported type is 'zamba'"),
    ),
    "decoder of an encoder": (
        lambda: BertModel(BertConfig(**TINY, is_decoder=True, add_cross_attention=True)),
        "attend to an encoder too",
    ),
    "cross-attention": (lambda: GPT2LMHeadModel(GPT2Config(**TINY, add_cross_attention=True)), "add_cross_attention"),
    "PEFT's inner model": (lambda: peft.get_peft_model(sharp_model("llama"), LORA).get_base_model(), "patch it first"),
    "PEFT": (lambda: peft.get_peft_model(sharp_model("llama"), LORA), "get_peft_model"),
    "DDP": (lambda: DistributedDataParallel(sharp_model("llama")), "DistributedDataParallel", "patch it first"),
    "FSDP": (lambda: fully_shard(sharp_model("llama")), "patch it first"),
    "data parallel": (lambda: nn.DataParallel(sharp_model("llama")), "DataParallel"),
    "compiled": (lambda: torch.compile(sharp_model("llama"), backend="eager"), "patch it first, then compile"),
    "compiled in place": (lambda: changed(lambda x: x.compile(backend="eager")), "patch it first, then compile"),
    "quantised": (lambda: altered(hf_quantizer=object()), "quantization_config"),
    "of integers": (lambda: changed(quantise), "LlamaAttention.q_proj", "no floating-point weight", "quantise it then"),
    "tensor parallel": (lambda: altered(_tp_size=2), "tensor parallelism"),
    "norms on norms": (lambda: sharp_model("qwen3"), "already normalises", "soft_cap"),
    "another forward": (lambda: changed(replace_forward), "model.layers.1.self_attn", "another tool"),
    "another attention": (lambda: changed(replace_attention), "no LlamaAttention"),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft calls it by its old name
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_can_not_be_patched(case):
    make, *words = REFUSED[case]
    message = refuse(make())
    assert all(word in message for word in words)


def test_a_patched_model():
    model = patch_model(sharp_model("llama"), "qk_norm_cap")
    before = fingerprint(model)
    with pytest.raises(ValueError, match="softcap=50.0.*unpatch_model"):
        patch_model(model, "none")
    assert fingerprint(model) == before


@needs_add_adapter
def test_a_model_with_adapters():
    model = sharp_model("llama")
    model.add_adapter(LORA)
    assert "patch it first" in refuse(model)


def test_a_forward_replaced_on_the_class(monkeypatch):
    monkeypatch.setattr(LlamaAttention, "forward", other_forward)
    assert "another tool" in refuse(sharp_model("llama"))


def test_scheme_and_backend_that_do_not_exist():
    model = sharp_model("llama")
    message = refuse(model, "soft_capp")
    assert "did you mean 'soft_cap'" in message
    assert "qk_norm_cap" in message
    assert "attn_implementation" in refuse(model, "none", attn_implementation="hf_qnorm")
    assert "hf_qknorm_tiled" in refuse(model, "soft_cap", attn_implementation="hf_qnorm")
    assert "softcap" in refuse(model, {"softcap": -1})
    assert "unknown scheme field 'soft_cap'" in refuse(model, {"soft_cap": 50})


def test_a_switch_that_the_type_does_not_read_is_no_reason():
    assert patch_model(sharp_model("llama", add_cross_attention=True), "qk_norm_cap").config.add_cross_attention


@pytest.mark.parametrize(
    "name", ["calibrate", "inspect_model", "logit_statistics", "peft_modules_to_save", "set_knee", "unpatch_model"]
)
def test_what_is_no_model_is_named(name):
    arguments = {"calibrate": (["text"],), "inspect_model": (["text"],), "set_knee": (1.0,)}.get(name, ())
    with ExitStack() as stack, pytest.raises(TypeError, match="got a str, expected a model"):
        stack.enter_context(getattr(hf_qknorm, name)("a folder", *arguments))
