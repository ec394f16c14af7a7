"""The outputs of each head in the projections of tiny models with 4 query heads and 2 key heads of 16."""

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

Rows = dict[str, tuple[str, list[slice]]]  # part → projection, and outputs by head

SEPARATE: Rows = {
    "q": ("q_proj", [slice(0, 16), slice(16, 32), slice(32, 48), slice(48, 64)]),
    "k": ("k_proj", [slice(0, 16), slice(16, 32)]),
}
LATENT: Rows = {
    "uq": ("q_b_proj", [slice(0, 16), slice(24, 40), slice(48, 64), slice(72, 88)]),
    "qr": ("q_b_proj", [slice(16, 24), slice(40, 48), slice(64, 72), slice(88, 96)]),
    "uk": ("kv_b_proj", [slice(0, 16), slice(28, 44), slice(56, 72), slice(84, 100)]),
    "dq": ("q_a_proj", [slice(0, 20)]),
    "dkv": ("kv_a_proj_with_mqa", [slice(0, 24)]),
    "kr": ("kv_a_proj_with_mqa", [slice(24, 32)]),
}
ROWS: dict[str, Rows] = {
    "llama": SEPARATE,
    "qwen2": SEPARATE,  # with biases
    "gemma": SEPARATE,  # its norms store the gain less 1
    "phi3": {
        "q": ("qkv_proj", [slice(0, 16), slice(16, 32), slice(32, 48), slice(48, 64)]),
        "k": ("qkv_proj", [slice(64, 80), slice(80, 96)]),
    },
    "gpt2": {
        "q": ("c_attn", [slice(0, 16), slice(16, 32), slice(32, 48), slice(48, 64)]),
        "k": ("c_attn", [slice(64, 80), slice(80, 96), slice(96, 112), slice(112, 128)]),
    },
    "gpt_neox": {
        "q": ("query_key_value", [slice(0, 16), slice(48, 64), slice(96, 112), slice(144, 160)]),
        "k": ("query_key_value", [slice(16, 32), slice(64, 80), slice(112, 128), slice(160, 176)]),
    },
    "deepseek_v3": LATENT,
}

# the norms of latents, in the attention layer
LATENT_NORMS = {"uq": "q_a_layernorm", "qr": "q_a_layernorm", "uk": "kv_a_layernorm"}


def input_norms(model: nn.Module, model_type: str) -> list[dict[str, Any]]:
    """The norm before each part's projection, by part, of each of `attention_layers`."""
    found = []
    for layer in attention_layers(model, model_type):
        (owner,) = (module for module in model.modules() if any(child is layer for child in module.children()))
        before = getattr(owner, "ln_1" if model_type == "gpt2" else "input_layernorm")
        latent = LATENT_NORMS.items() if "uq" in ROWS[model_type] else ()
        found.append(dict.fromkeys(ROWS[model_type], before) | {part: getattr(layer, name) for part, name in latent})
    return found


def attention_layers(model: nn.Module, model_type: str) -> list[Any]:
    """The modules with the projections of `ROWS`."""
    where = ROWS[model_type]["q" if "q" in ROWS[model_type] else "uq"][0]
    return [module for module in model.modules() if hasattr(module, where)]


def outputs_first(layer: Any, where: str) -> list[Tensor]:
    """The projection's weight as a view with the outputs in the first dimension, and its bias, if any."""
    projection = layer.get_submodule(where)
    weight = projection.weight.detach()
    weight = weight.t() if isinstance(projection, Conv1D) else weight
    return [weight] if projection.bias is None else [weight, projection.bias.detach()]
