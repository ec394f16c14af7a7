"""Tiny bidirectional models of images and text, and CLIP's text model: how each is made, called and trained."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

from hf_qknorm.families import FAMILIES, known_families
from hf_qknorm.model.install import own_layers
from qknorm_tests.tables import make_batch, real
from qknorm_tests.tiny import tiny_config

IMAGES = ("clip_vision_model", "deit", "ijepa", "siglip_vision_model", "vit", "vit_msn")

# The class that a type is loaded by, and what its tiny config has besides. Of encoders, the first stands for all.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("bert", "AutoModelForMaskedLM", {"is_decoder": False}),
    "clip_text_model": ("clip_text_model", "AutoModel", {"attention_dropout": 0.1}),
    "clip_vision_model": ("clip_vision_model", "AutoModel", {"attention_dropout": 0.1}),
    "siglip_text_model": ("siglip_text_model", "SiglipTextModel", {"attention_dropout": 0.1}),
    "siglip_vision_model": ("siglip_vision_model", "AutoModel", {"attention_dropout": 0.1}),
    "vit": (
        "vit",
        "AutoModelForImageClassification",
        {"attention_probs_dropout_prob": 0.1, "problem_type": "single_label_classification"},  # else a loss writes it
    ),
    "deit-classifier": (  # one of two, which transformers tells apart by `architectures`
        "deit",
        "AutoModelForImageClassification",
        {"problem_type": "single_label_classification", "architectures": ["DeiTForImageClassification"]},
    ),
    "vit-masked": ("vit", "AutoModelForMaskedImageModeling", {"encoder_stride": 4}),
}
ENCODERS = [name for name, family in FAMILIES.items() if family.causal == "is_decoder" and name in known_families()]
MORE = {
    f"{name}-encoder": (name, "AutoModelForMaskedLM" if name in MASKED else "AutoModel", {"is_decoder": False})
    for name in ENCODERS
} | {name: (name, "AutoModel", {"attention_probs_dropout_prob": 0.1}) for name in ("deit", "ijepa", "vit_msn")}


def type_of(case: str) -> str:
    return (CASES | MORE)[case][0]


def auto_of(case: str) -> Any:
    return getattr(transformers, (CASES | MORE)[case][1])


def made(case: str) -> PreTrainedModel:
    """A tiny model in eval mode whose attention logits spread over several nats, with no bias at zero."""
    model_type, _, settings = (CASES | MORE)[case]
    config = tiny_config(model_type, **settings)
    torch.manual_seed(0)
    auto = auto_of(case)
    model = auto._from_config(config) if issubclass(auto, PreTrainedModel) else auto.from_config(config)
    family = FAMILIES[model_type]
    for layer in own_layers(model, family).values():
        for part in family.style.weights[:2]:
            nn.init.normal_(layer.get_submodule(part).weight, std=0.2)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model.eval()


def batches(case: str) -> list[dict[str, Any]]:
    """Images, or text without padding and with it at either side; with labels where the model has a loss for them."""
    model_type, auto, _ = (CASES | MORE)[case]
    if model_type not in IMAGES:
        labels = auto == "AutoModelForMaskedLM"
        return [make_batch(kind, labels=labels) for kind in ("plain", "left", "right")]
    generator = torch.Generator().manual_seed(0)
    batch: dict[str, Any] = {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    if auto == "AutoModelForImageClassification":
        batch["labels"] = torch.tensor([0, 1])
    if auto == "AutoModelForMaskedImageModeling":
        batch["bool_masked_pos"] = torch.arange(16).expand(2, -1) % 3 == 1
    return [batch]


def out_of(result: Any) -> Tensor:
    return next(result[name] for name in ("logits", "reconstruction", "last_hidden_state") if name in result)


def seen(model: PreTrainedModel, batch: dict[str, Any]) -> Tensor:
    """The model's logits for the batch, without those of padding."""
    out = out_of(model(**batch))
    return out[real(batch)] if "attention_mask" in batch else out


def step(model: PreTrainedModel, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Loss, output and every gradient of one training step, its dropout seeded."""
    model.train()
    model.zero_grad()
    torch.manual_seed(0)
    result = model(**batch)
    loss = result["loss"] if "loss" in result else out_of(result).square().mean()
    loss.backward()
    model.eval()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "out": out_of(result).detach(), **gradients}
