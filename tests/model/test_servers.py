"""A server that puts its own attention into the model computes the same, or the checkpoint's code refuses it.

As vLLM's backend for transformers models does: `attn_implementation` names the server's function, the base model is
built from the config alone on the meta device, keys and values lie in the server's cache, flat. vLLM (0.32) takes the
cap and the window of the config, and the scale of the model's own forward.
"""

from collections.abc import Callable
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


def having(**attributes: Any) -> Callable[[Any, Any], None]:
    """A server whose second layer has these attributes."""
    return lambda model, layers: vars(layers[1]).update(attributes)


def applies(**settings: Any) -> Callable[[Any, Any], None]:
    return having(impl=SimpleNamespace(**settings))


def more_gains(model: Any, layers: Any) -> None:
    norm = patched_layers(model)["model.layers.1.self_attn"].k_norm
    norm.weight = nn.Parameter(norm.weight.repeat(2, 1))


def sinks(model: Any, layers: Any) -> None:
    patched_layers(model)["model.layers.1.self_attn"].sinks = torch.zeros(4)


CAPPED, BY_HEAD = "mixtral normed and capped", "llama by head, values too"
SERVE, DIVIDE = (
    "vLLM can't serve this checkpoint: layer 1 has the ",
    "vLLM can't divide this checkpoint .* layer 1 computes ",
)
REFUSED: list[tuple[str, Callable[[Any, Any], None], str]] = [
    (CAPPED, applies(scale=0.25, logits_soft_cap=0.5), f"{SERVE}cap 5.0, .* apply 0.5"),
    (CAPPED, applies(scale=0.25, logits_soft_cap=0), f"{SERVE}cap 5.0, .* apply none"),
    (CAPPED, applies(scale=0.25), f"{SERVE}cap 5.0, .* apply an unknown one"),
    (CAPPED, applies(scale=1.0, logits_soft_cap=5.0), f"{SERVE}scale 0.25, .* apply 1"),
    (CAPPED, having(sliding_window=None), rf"{SERVE}window \d+, .* apply none"),
    ("qwen3 with windows", applies(scale=0.25, logits_soft_cap=0.5), f"{SERVE}cap 5.0, .* apply 0.5"),  # own forward
    ("qwen3 with windows", having(sliding_window=None), rf"{SERVE}window \d+, .* apply none"),
    # Of tensor parallel workers, each computes every head of a type whose projections are not sharded.
    ("llama by Henry et al.", having(num_heads=2), f"{DIVIDE}4 heads in each, and vLLM would attend with 2"),
    (BY_HEAD, more_gains, f"{DIVIDE}2 heads in each, and k_norm has gains for 4"),
    (CAPPED, sinks, f"{SERVE}sinks"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
@torch.no_grad()
def test_what_a_server_would_not_do_is_refused(name, change, message):
    model = made(name)
    model.set_attn_implementation("vllm")
    layers = served(model)
    model(TOKENS, use_cache=False)
    change(model, layers)
    with pytest.raises(ValueError, match=message):
        model(TOKENS, use_cache=False)
