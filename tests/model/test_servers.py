"""A server that puts its own attention into the model computes the same: it reads the cap in the config.

As vLLM's and SGLang's backends for transformers models do: `attn_implementation` names the server's function, the base
model is built from the config alone on the meta device, keys and values lie in the server's cache, flat, and what the
function is told by the module is its layer and its scale.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModel, PreTrainedModel

from hf_qknorm import SCHEMES, Scheme, add_standalone, patch_model
from hf_qknorm.attend.functions import SERVER_BACKENDS
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


class ServerAttention:
    """A layer's attention as a server keeps it: flat tokens, a cache of its own, the cap from the config."""

    def __init__(self, config: Any) -> None:
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.scale = self.head_dim**-0.5
        self.softcap = config.attn_logit_softcapping
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
        out = reference.attention(q, k, v, scale=self.scale, softcap=self.softcap, causal=True).out
        return out[0].transpose(0, 1).flatten(1)


def serve(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_instances: dict[int, ServerAttention] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    assert attention_instances is not None
    layer = attention_instances[module.layer_idx]  # type: ignore[index]
    layer.scale = own_scale(module)
    assert scaling is None or scaling == layer.scale  # that of another would be ignored
    flat = (x.transpose(1, 2).reshape(query.shape[-2], -1) for x in (query, key, value))
    return layer.forward(*flat), None


def own_scale(module: nn.Module) -> float:
    """The scale that vLLM reads in the source of the model's own forward: an attribute of the layer, or a constant."""
    found = getattr(module, "scaling", None)
    return float(found) if found is not None else module.head_size**-0.5  # type: ignore[union-attr, operator]


def made(name: str) -> PreTrainedModel:
    model_type, scheme = CASES[name]
    return randomise(patch_model(sharp_model(model_type), scheme)).eval()


@pytest.mark.parametrize("server", SERVER_BACKENDS)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_server_computes_the_same(server, name, tmp_path, monkeypatch):
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
    layers = {layer.layer_idx: ServerAttention(config) for layer in patched_layers(model).values()}
    tokens = torch.arange(3, 3 + LENGTH)[None]
    ours.set_attn_implementation("hf_qknorm_eager")  # older transformers' default drops Gemma 2's own cap
    expected = ours.base_model(tokens).last_hidden_state
    served = []
    for start, stop in ((0, PROMPT), *((i, i + 1) for i in range(PROMPT, LENGTH))):
        places = torch.arange(start, stop)[None]
        out = model(tokens[:, start:stop], position_ids=places, use_cache=False, attention_instances=layers)
        served.append(out.last_hidden_state)
    torch.testing.assert_close(torch.cat(served, 1), expected, atol=1e-5, rtol=1e-5)
    assert all(len(layer.keys) == 1 + LENGTH - PROMPT for layer in layers.values())  # no call went another way
