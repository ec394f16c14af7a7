"""Patched models against transformers' own models that have the same norm or cap, with the same weights."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PhiConfig, Qwen3Config, Qwen3ForCausalLM, StableLmConfig
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.phi.modeling_phi import PhiAttention
from transformers.models.stablelm.modeling_stablelm import StableLmAttention

from hf_qknorm import Scheme, patch_model
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.norms import HeadNorm
from hf_qknorm.ops.norms import Shape
from qknorm_tests.error_budget import assert_within_budget, error
from qknorm_tests.tables import assert_near, make_batch, randomise, sharp_model
from qknorm_tests.tiny import TINY

EPS = 1e-6
TOLERANCE = 3e-6  # some tens of fp32 roundings
ROPE = {"rope_type": "default", "rope_theta": 100.0}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}

# The patched family, its settings, and those with which Qwen 3 is the same model.
QWEN3_TWINS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama-bias": ("llama", {"attention_bias": True}, {"attention_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 32}, {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": None}, {}),
    "mistral-window": ("mistral", {"sliding_window": 8}, WINDOWS),
    "qwen2": (
        "qwen2",
        {**WINDOWS, "max_window_layers": 1},
        {**WINDOWS, "max_window_layers": 1, "attention_bias": True},
    ),
}


# How the model's own norms are said as a scheme, its config, and its attention.
PEERS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "stablelm": ({"gain": "per_head", "bias": False}, StableLmConfig, StableLmAttention),
    "phi": ({"gain": "shared", "bias": True}, PhiConfig, PhiAttention),
}


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    result = model(**batch)
    result.loss.backward()
    return result.logits.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("twin", "backend", "knee"),
    [*((twin, backend, 0.0) for twin in QWEN3_TWINS for backend in ("sdpa", "eager")), ("llama", "eager", 16.0)],
)
def test_qk_norm_is_qwen3(twin, backend, knee):
    """With a knee it is Qwen 3 with an ε of their own in each of its norms."""
    model_type, settings, qwen_settings = QWEN3_TWINS[twin]
    patched = sharp_model(model_type, rms_norm_eps=EPS, rope_parameters=ROPE, **settings)
    randomise(patch_model(patched, Scheme(q="rms", k="rms", eps=EPS), attn_implementation=backend))
    for i, norm in enumerate(module for module in patched.modules() if isinstance(module, HeadNorm) and knee):
        norm.set_shape(Shape(knee + i))
    config = Qwen3Config(**TINY | {"rms_norm_eps": EPS, "rope_parameters": ROPE} | qwen_settings)
    qwen = Qwen3ForCausalLM._from_config(config, attn_implementation=backend).eval()
    weights = patched.state_dict()
    for name in [name for name in weights if name.endswith("_norm.knee")]:
        qwen.get_submodule(name.removesuffix(".knee")).variance_epsilon = EPS * 2 ** float(weights.pop(name)[0])
    loaded = qwen.load_state_dict(weights, strict=False)
    assert not loaded.unexpected_keys
    for name in loaded.missing_keys:  # only Qwen 3's output projection has a bias then
        assert name.endswith("o_proj.bias")
        nn.init.zeros_(qwen.get_parameter(name))

    batch = make_batch("left")
    logits, grads = gradients(patched, batch)
    qwen_logits, qwen_grads = gradients(qwen, batch)
    qwen.zero_grad()
    qwen.set_attn_implementation("sdpa")  # eager attention in fp64 is NaN for queries that see nothing
    exact_logits, exact_grads = gradients(qwen.double(), batch)
    assert_within_budget(logits, exact_logits, qwen_logits, "logits")
    assert any(name.endswith("k_norm.weight") for name in grads)
    for name, grad in grads.items():
        assert grad.abs().max() > 0, name
        if not name.endswith("k_proj.bias"):  # it cancels in the softmax
            assert_within_budget(grad, exact_grads[name], qwen_grads[name], name)


@pytest.mark.parametrize("backend", ["eager", "hf_qknorm", "hf_qknorm_eager"])
@pytest.mark.parametrize("cap", [0.5, 2.0])
def test_a_cap_on_llama_is_gemma2s(cap, backend, monkeypatch):
    """In fp64, for a cap that bites leaves gradients that nearly cancel."""
    batch = make_batch("right")  # Gemma 2's own attention is NaN in fp64 for rows that see nothing
    llama = sharp_model("llama").double()
    llama.set_attn_implementation("eager")
    plain = llama(**batch).logits
    capped = functools.partial(capped_as_gemma2, cap=cap)
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "eager_attention_forward", capped)
        expected, expected_grads = gradients(llama, batch)
    assert error(plain.detach(), expected) > 0.01, "the cap matters here"
    patched = patch_model(sharp_model("llama").double(), Scheme(softcap=cap), attn_implementation=backend)
    logits, grads = gradients(patched, batch)
    real = batch["attention_mask"].bool()
    assert_near(logits[real], expected[real], TOLERANCE)
    for name, grad in grads.items():
        assert_near(grad, expected_grads[name], TOLERANCE, name)


def capped_as_gemma2(*args: Any, cap: float, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return modeling_gemma2.eager_attention_forward(*args, softcap=cap, **kwargs)


@pytest.mark.parametrize("backend", ["eager", "hf_qknorm"])
@pytest.mark.parametrize("own_cap", [0.5, None])
def test_gemma2_with_its_own_cap_as_the_scheme(own_cap, backend):
    """A scheme's cap replaces Gemma 2's: with the same number, nothing changes."""
    batch = make_batch("left")
    native = sharp_model("gemma2", attn_logit_softcapping=0.5)
    native.set_attn_implementation("eager")  # the default of older transformers drops the cap
    patched = patch_model(
        sharp_model("gemma2", attn_logit_softcapping=own_cap), Scheme(softcap=0.5), attn_implementation=backend
    )
    real = batch["attention_mask"].bool()
    assert_near(patched(**batch).logits[real], native(**batch).logits[real], TOLERANCE)


@pytest.mark.parametrize("carrier", ["llama", "gpt_neox"])
@pytest.mark.parametrize("peer", ["stablelm", "phi"])
def test_layer_norm_attention_is_that_of_stablelm_and_phi(peer, carrier):
    """StableLM has one gain a head and no bias; Phi one gain and bias for all heads. GPT-NeoX rotates a part.

    In fp64, for the gradient of a key's bias is a sum that nearly cancels.
    """
    partial, heads_kv = {"llama": (1.0, 2), "gpt_neox": (0.25, 4)}[carrier]
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": partial}
    settings = TINY | {"rope_parameters": rope, "num_key_value_heads": heads_kv, "attention_bias": peer == "phi"}
    scheme = Scheme(q="layer", k="layer", eps=EPS, **PEERS[peer][0])
    model = patch_model(sharp_model(carrier, **settings), scheme, attn_implementation="sdpa").double()
    patched = next(iter(patched_layers(randomise(model)).values()))

    _, config_class, attention_class = PEERS[peer]
    config = config_class(**settings, qk_layernorm=True, layer_norm_eps=EPS, attn_implementation="sdpa")
    own = attention_class(config, layer_idx=0).eval().double()
    own.load_state_dict(renamed(own, dict(patched.named_parameters())))

    rotary_dim = int(TINY["head_dim"] * partial)
    out, grads = attend(patched, rotary_dim)
    own_out, own_grads = attend(own, rotary_dim)
    assert_near(out, own_out, 1e-13)
    for name, grad in renamed(own, grads).items():
        assert_near(grad, own_grads[name], 1e-12, name)


def attend(layer: nn.Module, rotary_dim: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Output of an attention module on fixed inputs, and the gradients of its parameters and its input."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 11, TINY["hidden_size"], generator=generator, dtype=torch.float64).requires_grad_()
    angles = torch.outer(torch.arange(11.0), 100 ** -torch.linspace(0, 1, rotary_dim // 2)).repeat(1, 2).double()
    cos_sin = angles.cos().expand(2, -1, -1), angles.sin().expand(2, -1, -1)
    causal = torch.full((11, 11), -torch.inf, dtype=torch.float64).triu(1).expand(2, 1, 11, 11)
    out, _ = layer(hidden_states=hidden, position_embeddings=cos_sin, attention_mask=causal)
    out.square().sum().backward()
    return out.detach(), {"hidden": hidden.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def renamed(own: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The patched attention's parameters, or their gradients, under the names of the model that has its own norms."""
    result = {}
    output = "dense" if hasattr(own, "dense") else "o_proj"
    for name, tensor in tensors.items():
        part, _, kind = name.partition(".")
        if part == "query_key_value":  # by head: q, k, v
            by_head = tensor.view(-1, 3, TINY["head_dim"], *tensor.shape[1:])
            result |= {f"{x}_proj.{kind}": by_head[:, i].flatten(0, 1) for i, x in enumerate("qkv")}
        elif part in ("dense", "o_proj"):
            result[f"{output}.{kind}"] = tensor
        elif part in ("q_norm", "k_norm") and tensor.dim() == 2:
            result |= {f"{part[0]}_layernorm.norms.{head}.{kind}": row for head, row in enumerate(tensor)}
        elif part in ("q_norm", "k_norm"):
            result[f"{part[0]}_layernorm.{kind}"] = tensor
        else:
            result[name] = tensor
    return result
