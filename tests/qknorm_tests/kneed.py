"""Patched models with a knee, and with different gains and mean powers in each norm."""

from typing import Any

import peft
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_qknorm import SCHEMES as PRESETS
from hf_qknorm import Scheme, patch_model, peft_modules_to_save
from hf_qknorm.model.attention import head_norms, patched_layers
from hf_qknorm.model.norms import HeadNorm
from qknorm_tests.tables import make_batch, randomise, sharp_model

RMS = Scheme(q="rms", k="rms")
SCHEMES = {
    "rms": ("llama", RMS),
    "layer": ("gpt2", Scheme(q="layer", k="layer", v="layer", softcap=5.0)),
    "l2": ("llama", Scheme(q="l2", k="rms", v="l2", gain="per_head", bias=True)),
    "lp": ("llama", Scheme(q="lp", k="lp", gain="per_head", p=3.0)),
    "scalar": ("llama", Scheme(q="lp", k="rms", v="rms", gain="scalar", p=3.0, scale=1.0)),
    "keys": ("llama", Scheme(k="rms", gain="scalar")),
}
SHARPNESS = {"layer": 2.0, "l2": 8.0, "lp": 4.0}  # else 1
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


def set_shapes(model: Any, knee: float, power: float = 0.1, sharpness: float = 1.0) -> None:
    """Set this knee, and a mean |x|ᵖ in each norm that differs from the others'."""
    for i, norm in enumerate(norms(model)):
        norm.set_shape(norm.rounded(knee, power + 0.2 * i, sharpness))


def kneed(case: str = "rms", knee: float = KNEE, power: float = 0.1, **settings: Any) -> PreTrainedModel:
    """A patched model with a knee, and with different gains and mean |x|ᵖ in each norm."""
    model_type, scheme = SCHEMES[case]
    model = randomise(patch_model(sharp_model(model_type, **settings), scheme))
    set_shapes(model, knee, power, SHARPNESS.get(case, 1.0))
    return model.eval()


def plain(case: str = "rms", **settings: Any) -> PreTrainedModel:
    model_type, scheme = SCHEMES[case]
    return patch_model(sharp_model(model_type, **settings), scheme).eval()


def norms(model: Any) -> list[HeadNorm]:
    return [norm for layer in patched_layers(model).values() for norm in head_norms(layer).values()]


@torch.no_grad()
def logits(model: Any, kind: str = "left") -> Tensor:
    """The logits without dropout."""
    return model.eval()(**make_batch(kind, labels=False)).logits


def wrapped(model: PreTrainedModel, *, fresh: bool = False) -> peft.PeftModel:
    """A model with an adapter, and with copies of its norms that differ from the originals unless `fresh`."""
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, modules_to_save=peft_modules_to_save(model))).eval()
    for parameter in adapted.parameters():
        if parameter.requires_grad and not fresh:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return adapted


def knees_of(model: Any) -> dict[str, Tensor]:
    """The shapes of a patched model's norms, by name."""
    return {name: value.clone() for name, value in model.state_dict().items() if name.endswith(".knee")}
