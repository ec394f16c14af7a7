"""Patched models with a knee, and with different gains and mean powers in each norm."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_qknorm import SCHEMES as PRESETS
from hf_qknorm import Scheme, patch_model, peft_modules_to_save
from hf_qknorm.model.attention import head_norms, patched_layers
from hf_qknorm.model.knees import apply_knee, powers_of
from hf_qknorm.model.norms import HeadNorm
from qknorm_tests.tables import make_batch, randomise, sharp_model
from qknorm_tests.tiny import tiny_model

RMS = Scheme(q="rms", k="rms")
SCHEMES = {
    "rms": ("llama", RMS),
    "layer": ("gpt2", Scheme(q="layer", k="layer", v="layer", softcap=5.0, sharpness=2)),
    "l2": ("llama", Scheme(q="l2", k="rms", v="l2", gain="per_head", bias=True, sharpness=8)),
    "lp": ("llama", Scheme(q="lp", k="lp", gain="per_head", p=3.0, sharpness=4)),
    "scalar": ("llama", Scheme(q="lp", k="rms", v="rms", gain="scalar", p=3.0, scale=1.0)),
    "keys": ("llama", Scheme(k="rms", gain="scalar")),
}
KNEE = 4.0
BIASES = {"attention_bias": True}
# Norms that can be removed: model type, scheme, settings.
REMOVED: dict[str, tuple[str, Scheme, dict[str, Any]]] = {
    "rms": ("llama", Scheme(q="rms", k="rms"), {}),
    "keys, per head, with a bias": ("llama", Scheme(k="rms", gain="per_head", bias=True, scale=0.3), BIASES),
    "lp, per head": ("llama", Scheme(q="lp", k="lp", gain="per_head", p=3.0), {}),
    "henry": ("llama", PRESETS["henry"], {}),
    "layer, fused, capped": ("gpt2", Scheme(q="layer", k="layer", softcap=5.0), {}),
    "interleaved": ("gpt_neox", Scheme(q="rms", k="rms"), {}),
    "layer": ("llama", Scheme(q="layer", k="layer"), BIASES),
    "decoder alone": ("bart", Scheme(q="rms", k="rms"), {}),
}


def kneed(case: str = "rms", knee: float = KNEE, **settings: Any) -> PreTrainedModel:
    """A patched model with a knee, and with different gains and mean |x|ᵖ in each norm."""
    model_type, scheme = SCHEMES[case]
    model = randomise(patch_model(sharp_model(model_type, **settings), dataclasses.replace(scheme, knee=knee)))
    powers = {key: 0.1 + 0.2 * i for i, key in enumerate(powers_of(model))}
    apply_knee(model, knee, powers)
    return model.eval()


def qwen3(**settings: Any) -> Any:
    """A Qwen 3 whose gains, and heads' sizes, differ."""
    model = sharp_model("qwen3", **settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
            if name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
                parameter[:16] *= 3
    return model.eval()


def plain(case: str = "rms", **settings: Any) -> PreTrainedModel:
    model_type, scheme = SCHEMES[case]
    return patch_model(sharp_model(model_type, **settings), scheme).eval()


def norms(model: Any) -> list[HeadNorm]:
    return [norm for layer in patched_layers(model).values() for norm in head_norms(layer).values()]


@torch.no_grad()
def logits(model: Any, kind: str = "left") -> Tensor:
    return model(**make_batch(kind, labels=False)).logits


def wrapped(model: PreTrainedModel, *, fresh: bool = False) -> peft.PeftModel:
    """A model with an adapter, and with copies of its norms that differ from the originals unless `fresh`."""
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, modules_to_save=peft_modules_to_save(model))).eval()
    for parameter in adapted.parameters():
        if parameter.requires_grad and not fresh:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return adapted


def eps_of(model: Any) -> dict[str, Tensor]:
    """The ε of a patched model's norms with a knee, by the names that older versions gave them in the weights."""
    modules = model.named_modules()
    found = {f"{name}.eps": m.eps for name, m in modules if isinstance(m, HeadNorm) and isinstance(m.eps, Tensor)}
    return {name: eps.clone() for name, eps in found.items()}


def as_older(folder: Path) -> list[str]:
    """Change a checkpoint to the format of versions 0.1 and 0.2, with ε in the weights alone; return their names."""
    config = json.loads((folder / "config.json").read_text())
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        part.pop("qk_norm_powers", None)
    (folder / "config.json").write_text(json.dumps(config))
    return [name for name in load_file(folder / "model.safetensors") if name.endswith(".eps")]


def without_gain() -> PreTrainedModel:
    return patch_model(tiny_model("llama"), Scheme(q="rms", k="rms", gain="none", knee=1.0))
