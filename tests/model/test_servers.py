"""A server that puts its own attention into the model computes the same, or the checkpoint's code refuses it.

As vLLM's backend for transformers models does: `attn_implementation` names the server's function, the base model is
built from the config alone on the meta device, keys and values lie in the server's cache, flat. vLLM (0.32) takes the
cap and the window of the config, and the scale of the model's own forward.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModel, PreTrainedModel

from hf_qknorm import SCHEMES, Scheme, patch_model
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.ops import reference
from hf_qknorm.standalone.generate import add_standalone
from qknorm_tests.tables import randomise, sharp_model

CASES = {
    "llama normed and capped": ("llama", Scheme(q="rms", k="rms", softcap=5.0)),
    "llama by head, values too": ("llama", Scheme(q="rms", k="l2", v="rms", gain="per_head", scale=0.5, softcap=3.0)),
    "qwen3 with windows": ("qwen3", Scheme(softcap=5.0)),
    "llama by Henry et al.": ("llama", SCHEMES["henry"]),
    "phi3 normed": ("phi3", Scheme(q="layer", k="layer")),
    "mixtral normed and capped": ("mixtral", Scheme(q="rms", k="rms", softcap=5.0)),
    "gemma2 with its own cap": ("gemma2", Scheme(q="rms")),
}
PROMPT, LENGTH = 5, 7  # shorter than the tiny models' windows
TOKENS = torch.arange(3, 9)[None]


class ServerAttention(nn.Module):
    """A layer's attention as a server keeps it: flat tokens, and a cache of its own."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        config = layer.config
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        found = getattr(layer, "scaling", None)  # what vLLM reads in the source of the model's own forward
        scale = getattr(layer, "head_size", self.head_dim) ** -0.5 if found is None else float(found)
        kinds = getattr(config, "layer_types", None)
        slides = not kinds or kinds[layer.layer_idx] == "sliding_attention"
        self.sliding_window = getattr(config, "sliding_window", None) if slides else None
        self.impl = SimpleNamespace(scale=scale, logits_soft_cap=config.attn_logit_softcapping or 0)
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
        cap = self.impl.logits_soft_cap or None
        out = reference.attention(q, k, v, scale=self.impl.scale, softcap=cap, causal=True).out
        return out[0].transpose(0, 1).flatten(1)


def serve(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    flat = (x.transpose(1, 2).reshape(query.shape[-2], -1) for x in (query, key, value))
    return module.attn.forward(*flat), None


def made(name: str) -> PreTrainedModel:
    model_type, scheme = CASES[name]
    windows = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0} if "windows" in name else {}
    return randomise(patch_model(sharp_model(model_type, **windows), scheme)).eval()


def served(model: PreTrainedModel) -> dict[int, ServerAttention]:
    """The server's attention of each layer, put into the model."""
    patched = {layer.layer_idx: layer for layer in patched_layers(model).values()}
    for layer in patched.values():
        layer.attn = ServerAttention(layer)
    return {index: layer.attn for index, layer in patched.items()}


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "vllm", serve)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_server_computes_the_same(name, tmp_path):
    ours = made(name)
    ours.save_pretrained(tmp_path)
    add_standalone(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    config._attn_implementation = "vllm"
    with torch.device("meta"):
        model = AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=True)
    assert type(model)._supports_attention_backend
    model.to_empty(device="cpu").load_state_dict(ours.base_model.state_dict())
    for name_, buffer in ours.base_model.named_buffers():  # a server makes those that no checkpoint holds
        model.get_buffer(name_).copy_(buffer)
    model.eval()
    layers, tokens = served(model), torch.arange(3, 3 + LENGTH)[None]
    ours.set_attn_implementation("hf_qknorm_eager")  # older transformers' default drops Gemma 2's own cap
    expected = ours.base_model(tokens).last_hidden_state
    found = []
    for start, stop in ((0, PROMPT), *((i, i + 1) for i in range(PROMPT, LENGTH))):
        out = model(tokens[:, start:stop], position_ids=torch.arange(start, stop)[None], use_cache=False)
        found.append(out.last_hidden_state)
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-5, rtol=1e-5)
    assert all(len(layer.keys) == 1 + LENGTH - PROMPT for layer in layers.values())  # no call went another way


# What a server's attention is changed to, and what the refusal says of it.
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "another cap": ({"impl": SimpleNamespace(scale=0.25, logits_soft_cap=0.5)}, "the cap 5.0, .* apply 0.5"),
    "no cap": ({"impl": SimpleNamespace(scale=0.25, logits_soft_cap=0)}, "the cap 5.0, .* apply none"),
    "an unknown cap": ({"impl": SimpleNamespace(scale=0.25)}, "the cap 5.0, .* apply an unknown one"),
    "another scale": ({"impl": SimpleNamespace(scale=1.0, logits_soft_cap=5.0)}, "the scale 0.25, .* apply 1"),
    "no window": ({"sliding_window": None}, r"the window \d+, .* apply none"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["mixtral normed and capped", "qwen3 with windows"])
@torch.no_grad()
def test_what_a_server_would_not_do_is_refused(change, name):
    """Qwen 3 runs its own forward."""
    attributes, message = CHANGES[change]
    model = made(name)
    model.set_attn_implementation("vllm")
    layers = served(model)
    model(TOKENS, use_cache=False)
    for name_, value in attributes.items():
        setattr(layers[1], name_, value)
    with pytest.raises(ValueError, match=f"vLLM can't serve this checkpoint: layer 1 has {message}"):
        model(TOKENS, use_cache=False)


@torch.no_grad()
def test_a_part_of_the_heads_is_refused():
    """Tensor parallel workers compute every head of a type whose projections are not sharded."""
    model = made("llama by Henry et al.")
    model.set_attn_implementation("vllm")
    layers = served(model)
    for layer in layers.values():
        layer.num_heads = 4
    model(TOKENS, use_cache=False)
    layers[1].num_heads = 2
    with pytest.raises(ValueError, match="vLLM can't divide this checkpoint among processes: layer 1 computes 4"):
        model(TOKENS, use_cache=False)


@torch.no_grad()
def test_gains_by_head_are_not_divided():
    model = made("llama by head, values too")
    model.set_attn_implementation("vllm")
    layer = next(iter(patched_layers(model).values()))
    served(model)
    layer.k_norm.weight = nn.Parameter(layer.k_norm.weight.repeat(2, 1))
    with pytest.raises(ValueError, match="layer 0 computes 2 heads in each, and k_norm has gains for 4"):
        model(TOKENS, use_cache=False)


@torch.no_grad()
def test_sinks_are_not_lost():
    model = patch_model(sharp_model("gpt_oss"), "qk_norm").eval()
    for layer in patched_layers(model).values():
        layer.config._attn_implementation_internal = "vllm"
        layer.config.sliding_window = None
    served(model)
    with pytest.raises(ValueError, match="vLLM can't serve this checkpoint: layer 0 has the sinks"):
        model(TOKENS, use_cache=False)
