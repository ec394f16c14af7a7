"""Tiny multimodal models, each with a tower of text and one of images."""

from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from qknorm_tests.tiny import tiny_config

# A multimodal type, the types of its text tower and of its vision tower, and where these are.
TOWERS = {
    "llava": ("llama", "clip_vision_model", "language_model", "vision_tower"),
    "llava_onevision": ("qwen2", "siglip_vision_model", "language_model", "vision_tower"),
    "mistral3": ("mistral", "clip_vision_model", "language_model", "vision_tower"),
    "paligemma": ("gemma", "siglip_vision_model", "language_model", "vision_tower"),
    "idefics3": ("llama", "idefics3_vision", "text_model", "vision_model"),
}
IMAGE_TOKEN = 60
SETTINGS: dict[str, dict[str, Any]] = {
    "llava": {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    "paligemma": {"projection_dim": 64},
}


def tiny_towers(case: str) -> PreTrainedModel:
    """A tiny model in eval mode, its weights large."""
    text, vision, *_ = TOWERS[case]
    parts = {
        "text_config": tiny_config(text, initializer_range=0.2).to_dict(),
        "vision_config": tiny_config(vision, image_size=16, patch_size=4).to_dict(),
    }
    name = "image_token_id" if case == "idefics3" else "image_token_index"
    config = CONFIG_MAPPING[case](**parts, **{name: IMAGE_TOKEN}, **SETTINGS.get(case, {}))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    for layer in (m for m in model.modules() if hasattr(m, "q_proj")):
        for projection in (layer.q_proj, layer.k_proj):
            nn.init.normal_(projection.weight, std=0.2)
    return model.eval()
