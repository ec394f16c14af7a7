"""Models that can't be patched are refused with the reason and a remedy, and stay unchanged."""

from __future__ import annotations

import types
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from hf_qknorm import FAMILIES, patch_model
from hf_qknorm.model.derived import QKNormModel
from qknorm_tests.adapters import needs_add_adapter
from qknorm_tests.tables import MODEL_TYPES, fingerprint, sharp_model
from qknorm_tests.tiny import TINY

LORA = peft.LoraConfig(r=2, target_modules=["q_proj"])


def refuse(model: Any, *args: Any, error: type[Exception] = ValueError, **kwargs: Any) -> str:
    """Return the message with which `patch_model` refuses `model`, and check that it leaves the model unchanged."""
    before = fingerprint(model) if hasattr(model, "config") else str(model)
    with pytest.raises(error) as refusal:
        patch_model(model, *args, **kwargs)
    assert (fingerprint(model) if hasattr(model, "config") else str(model)) == before
    assert not any(isinstance(module, QKNormModel) for module in model.modules())
    return str(refusal.value)


def test_a_model_type_that_is_not_supported():
    message = refuse(AutoModelForCausalLM.from_config(MambaConfig(**TINY)))
    assert "mamba" in message
    assert all(model_type in message for model_type in FAMILIES)


def test_the_decoder_of_an_encoder():
    config = BertConfig(**TINY, is_decoder=True, add_cross_attention=True)
    assert "attend to an encoder too" in refuse(BertModel(config))


def test_a_patched_model():
    model = patch_model(sharp_model("llama"), "qk_norm_cap")
    before = fingerprint(model)
    with pytest.raises(ValueError, match="softcap=50.0.*unpatch_model"):
        patch_model(model, "none")
    assert fingerprint(model) == before


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft calls it by its old name
def test_a_peft_model():
    model = peft.get_peft_model(sharp_model("llama"), LORA)
    assert "get_peft_model" in refuse(model)


@needs_add_adapter
def test_a_model_with_adapters():
    model = sharp_model("llama")
    model.add_adapter(LORA)
    assert "patch it first" in refuse(model)


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel():
    message = refuse(nn.parallel.DistributedDataParallel(sharp_model("llama")))
    assert "DistributedDataParallel" in message
    assert "patch it first" in message


@pytest.mark.usefixtures("process_group")
def test_fully_sharded():
    assert "patch it first" in refuse(fully_shard(sharp_model("llama")))


def test_data_parallel():
    assert "DataParallel" in refuse(nn.DataParallel(sharp_model("llama")))


def test_compiled():
    assert "patch it first, then compile" in refuse(torch.compile(sharp_model("llama"), backend="eager"))
    model = sharp_model("llama")
    model.compile(backend="eager")
    assert "patch it first, then compile" in refuse(model)


def test_quantised():
    model = sharp_model("llama")
    model.hf_quantizer = object()
    assert "quantization_config" in refuse(model)


def test_tensor_parallel():
    model = sharp_model("llama")
    model._tp_size = 2
    assert "tensor parallelism" in refuse(model)


def test_norms_on_norms():
    message = refuse(sharp_model("qwen3"), "qk_norm")
    assert "already normalises" in message
    assert "soft_cap" in message


def test_cross_attention():
    model = GPT2LMHeadModel(GPT2Config(**TINY, add_cross_attention=True))
    assert "add_cross_attention" in refuse(model)


def other_forward(self: nn.Module, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
    return hidden_states, None


def test_a_forward_replaced_on_an_instance():
    model = sharp_model("llama")
    layer = model.model.layers[1].self_attn
    layer.forward = types.MethodType(other_forward, layer)
    message = refuse(model)
    assert "model.layers.1.self_attn" in message
    assert "another tool" in message


def test_a_forward_replaced_on_the_class(monkeypatch):
    monkeypatch.setattr(LlamaAttention, "forward", other_forward)
    assert "another tool" in refuse(sharp_model("llama"))


def test_attention_of_another_class():
    """Another tool has replaced every attention module, so nothing is left to patch."""
    model = sharp_model("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("FasterAttention", (LlamaAttention,), {})
    assert "no LlamaAttention" in refuse(model)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_scheme_and_backend_that_do_not_exist(model_type):
    model = sharp_model(model_type)
    message = refuse(model, "soft_capp")
    assert "did you mean 'soft_cap'" in message
    assert "qk_norm_cap" in message
    assert "attn_implementation" in refuse(model, "none", attn_implementation="hf_qnorm")
    assert "hf_qknorm_tiled" in refuse(model, "soft_cap", attn_implementation="hf_qnorm")
    assert "softcap" in refuse(model, {"softcap": -1})
    assert "unknown scheme field 'soft_cap'" in refuse(model, {"soft_cap": 50})
