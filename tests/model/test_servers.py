"""A server that puts its own attention into the model computes the same, or the checkpoint's code refuses it.

As vLLM's and SGLang's backends for transformers models do: `attn_implementation` names the server's function, the base
model is built from the config alone on the meta device, keys and values lie in the server's cache, flat. vLLM (0.32)
takes the cap and the window of the config, and the scale of the model's own forward; SGLang the scale of the call, the
window of `layer_types`, and no cap.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModel, PreTrainedModel

from hf_qknorm import SCHEMES, Scheme, add_standalone, patch_model
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.ops import reference
from qknorm_tests.tables import randomise, sharp_model

CASES = {
    "llama normed and capped": ("llama", Scheme(q="rms", k="rms", softcap=5.0)),
    "llama by head, values too": ("llama", Scheme(q="rms", k="l2", v="rms", gain="per_head", scale=0.5, softcap=3.0)),
    "qwen2 capped": ("qwen2", Scheme(softcap=4.0)),
    "qwen3 capped": ("qwen3", Scheme(softcap=4.0)),
    "llama by Henry et al.": ("llama", SCHEMES["henry"]),
    "phi3 normed": ("phi3", Scheme(q="layer", k="layer")),
    "mixtral normed and capped": ("mixtral", Scheme(q="rms", k="rms", softcap=5.0)),
    "gemma2 with its own cap": ("gemma2", Scheme(q="rms")),
    "gemma2 with another cap": ("gemma2", Scheme(softcap=2.0)),
    "gpt_neox normed and capped": ("gpt_neox", Scheme(q="layer", k="layer", softcap=5.0)),
}
PROMPT, LENGTH = 5, 7  # shorter than the tiny models' windows


class ServerAttention(nn.Module):
    """A layer's attention as a server keeps it: flat tokens, and a cache of its own."""

    def __init__(self, layer: Any, server: str) -> None:
        super().__init__()
        config = layer.config
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        found = getattr(layer, "scaling", None)  # what vLLM reads in the source of the model's own forward
        scale = getattr(layer, "head_size", self.head_dim) ** -0.5 if found is None else float(found)
        kinds = getattr(config, "layer_types", None)
        slides = kinds[layer.layer_idx] == "sliding_attention" if kinds else server == "vllm"
        window = getattr(config, "sliding_window", None) if slides else None
        if server == "vllm":
            self.impl = SimpleNamespace(scale=scale, logits_soft_cap=config.attn_logit_softcapping or 0)
            self.sliding_window = window
        else:
            self.scaling, self.logit_cap, self.sliding_window_size = self.head_dim**-0.5, 0.0, window or -1
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Flat tokens `[T, H·D]` to the same, over all that has been seen."""
        self.keys.append(key)
        self.values.append(value)
        q, k, v = (
            x.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)[None]
            for x in (query, torch.cat(self.keys), torch.cat(self.values))
        )
        scale, cap = (self.impl.scale, self.impl.logits_soft_cap) if hasattr(self, "impl") else (self.scaling, 0.0)
        out = reference.attention(q, k, v, scale=scale, softcap=cap or None, causal=True).out
        return out[0].transpose(0, 1).flatten(1)


def serve(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_instances: dict[int, ServerAttention] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if attention_instances is None:  # vLLM
        layer = module.attn
    else:
        layer = attention_instances[module.layer_idx]
        layer.scaling = scaling
    flat = (x.transpose(1, 2).reshape(query.shape[-2], -1) for x in (query, key, value))
    return layer.forward(*flat), None


def made(name: str) -> PreTrainedModel:
    model_type, scheme = CASES[name]
    return randomise(patch_model(sharp_model(model_type), scheme)).eval()


def served_by(server: str, model: PreTrainedModel) -> tuple[dict[int, ServerAttention], dict[str, Any]]:
    """The server's attention of each layer, put into the model, and the arguments of its calls."""
    patched = {layer.layer_idx: layer for layer in patched_layers(model).values()}
    layers = {index: ServerAttention(layer, server) for index, layer in patched.items()}
    for index, layer in patched.items() if server == "vllm" else ():
        layer.attn = layers[index]
    return layers, {"use_cache": False} | ({} if server == "vllm" else {"attention_instances": layers})


@pytest.mark.parametrize("server", ["vllm", "sglang"])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_server_computes_the_same_or_is_refused(server, name, tmp_path, monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, server, serve)
    ours = made(name)
    ours.save_pretrained(tmp_path)
    add_standalone(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    config._attn_implementation = server
    with torch.device("meta"):
        model = AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=True)
    assert type(model)._supports_attention_backend
    model.to_empty(device="cpu").load_state_dict(ours.base_model.state_dict())
    for name_, buffer in ours.base_model.named_buffers():  # a server makes those that no checkpoint holds
        model.get_buffer(name_).copy_(buffer)
    model.eval()
    layers, given = served_by(server, model)
    tokens = torch.arange(3, 3 + LENGTH)[None]
    lost = {"cap": ours.config.attn_logit_softcapping, "window": next(iter(patched_layers(ours).values())).window}
    if server == "sglang" and any(lost.values()):
        with pytest.raises(ValueError, match=r"sglang can't serve this checkpoint: layer 0 has the (cap|window) \d"):
            model(tokens, **given)
        return
    ours.set_attn_implementation("hf_qknorm_eager")  # older transformers' default drops Gemma 2's own cap
    expected = ours.base_model(tokens).last_hidden_state
    found = []
    for start, stop in ((0, PROMPT), *((i, i + 1) for i in range(PROMPT, LENGTH))):
        out = model(tokens[:, start:stop], position_ids=torch.arange(start, stop)[None], **given)
        found.append(out.last_hidden_state)
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-5, rtol=1e-5)
    assert all(len(layer.keys) == 1 + LENGTH - PROMPT for layer in layers.values())  # no call went another way


# What a server's attention is changed to, and what the refusal says of it.
CHANGES: dict[str, tuple[str, dict[str, Any], str]] = {
    "another cap": ("vllm", {"impl": SimpleNamespace(scale=0.25, logits_soft_cap=0.5)}, "the cap 5.0, .* apply 0.5"),
    "no cap": ("vllm", {"impl": SimpleNamespace(scale=0.25, logits_soft_cap=0)}, "the cap 5.0, .* apply none"),
    "an unknown cap": ("vllm", {"impl": SimpleNamespace(scale=0.25)}, "the cap 5.0, .* apply an unknown one"),
    "another scale": ("vllm", {"impl": SimpleNamespace(scale=1.0, logits_soft_cap=5.0)}, "the scale 0.25, .* apply 1"),
    "no window": ("vllm", {"sliding_window": None}, r"the window \d+, .* apply none"),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_what_a_server_would_not_do_is_refused(change, monkeypatch):
    server, attributes, message = CHANGES[change]
    monkeypatch.setitem(AttentionInterface._global_mapping, server, serve)
    model = made("mixtral normed and capped")
    model.set_attn_implementation(server)
    layers, given = served_by(server, model)
    model(torch.arange(3, 9)[None], **given)
    for name, value in attributes.items():
        setattr(layers[1], name, value)
    with pytest.raises(ValueError, match=f"vllm can't serve this checkpoint: layer 1 has {message}"):
        model(torch.arange(3, 9)[None], **given)


@pytest.mark.parametrize(("server", "name"), [("vllm", "num_heads"), ("sglang", "tp_q_head_num")])
@torch.no_grad()
def test_a_part_of_the_heads_is_refused(server, name, monkeypatch):
    """Tensor parallel workers compute every head of a type whose projections are not sharded."""
    monkeypatch.setitem(AttentionInterface._global_mapping, server, serve)
    model = made("llama by Henry et al.")
    model.set_attn_implementation(server)
    layers, given = served_by(server, model)
    for layer in layers.values():
        setattr(layer, name, 4)
    model(torch.arange(3, 9)[None], **given)
    setattr(layers[1], name, 2)
    with pytest.raises(ValueError, match=f"{server} can't divide this checkpoint among processes: layer 1 computes 4"):
        model(torch.arange(3, 9)[None], **given)


@torch.no_grad()
def test_gains_by_head_are_not_divided(monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "vllm", serve)
    model = made("llama by head, values too")
    model.set_attn_implementation("vllm")
    layer = next(iter(patched_layers(model).values()))
    served_by("vllm", model)
    layer.k_norm.weight = nn.Parameter(layer.k_norm.weight.repeat(2, 1))
    with pytest.raises(ValueError, match="layer 0 computes 2 heads in each, and k_norm has gains for 4"):
        model(torch.arange(3, 9)[None])


@pytest.mark.parametrize("server", ["vllm", "sglang"])
@pytest.mark.parametrize(("model_type", "what"), [("gpt_oss", "sinks"), ("bloom", "position bias")])
@torch.no_grad()
def test_sinks_and_position_biases_are_not_lost(server, model_type, what, monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, server, serve)
    model = patch_model(sharp_model(model_type), "qk_norm").eval()
    for layer in patched_layers(model).values():
        layer.config._attn_implementation_internal = server
        layer.config.sliding_window = None
    _, given = served_by(server, model)
    with pytest.raises(ValueError, match=f"{server} can't serve this checkpoint: layer 0 has the {what}"):
        model(torch.arange(3, 9)[None], **given)
