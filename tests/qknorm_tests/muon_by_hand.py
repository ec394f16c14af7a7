"""A step of MuonClip without its clip, by torch's own Muon and AdamW."""

from __future__ import annotations

import re

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments

# By model type, the names of the parameters for Muon, and how those of several matrices are split.
MATRICES = {
    "llama": r"layers\.\d\.(self_attn|mlp)\.\w+\.weight",
    "gemma2": r"layers\.\d\.(self_attn|mlp)\.\w+\.weight",
    "qwen2": r"layers\.\d\.(self_attn|mlp)\.\w+\.weight",
    "gpt2": r"h\.\d\.(attn|mlp)\.\w+\.weight",
    "phi3": r"layers\.\d\.(self_attn|mlp)\.\w+\.weight",
    "gpt_neox": r"layers\.\d\.(attention|mlp)\.\w+\.weight",
    "dbrx": r"blocks\.\d\.(norm_attn_norm\.attn\.\w+|ffn\.router\.layer)\.weight",
    "mixtral": r"layers\.\d\.(self_attn\.\w+\.weight|mlp\.experts\.\w+)",
    "gpt_oss": r"layers\.\d\.(self_attn\.\w+\.weight|mlp\.experts\.\w+_proj)",
    "deepseek_v3": r"layers\.\d\.(self_attn\.\w+_proj\w*\.weight|mlp\.([a-z_]+\.)?\w+_proj(\.weight)?)",
}


def matrices_of(name: str, x: Tensor) -> list[Tensor]:
    """The matrices in a parameter or its gradient, as views; tiny models have 4 heads of 16, and 2 of keys."""
    if name.endswith("c_attn.weight"):
        return list(x.chunk(3, dim=1))
    if name.endswith(("qkv_proj.weight", "Wqkv.weight")):
        return list(x.split([64, 32, 32]))
    if name.endswith("query_key_value.weight"):
        return list(x.view(4, 3, 16, -1).unbind(1))
    return list(x.unbind()) if x.dim() == 3 else [x]


class ByHand:
    """torch.optim.Muon and AdamW on copies of the matrices and vectors of a model, which are written back."""

    def __init__(self, model: PreTrainedModel, arguments: TrainingArguments, momentum: float) -> None:
        self.model = model
        pattern = re.compile(MATRICES[model.config.model_type.removeprefix("qknorm_")] + "$")
        self.matrices = {
            name: [part.detach().reshape(-1, part.shape[-1]).clone() for part in matrices_of(name, p)]
            for name, p in model.named_parameters()
            if pattern.search(name)
        }
        others = {name: p for name, p in model.named_parameters() if name not in self.matrices}
        decayed = [p for name, p in others.items() if not re.search(r"norm|bias|ln_", name)]
        plain = [p for name, p in others.items() if re.search(r"norm|bias|ln_", name)]
        everything = [part for parts in self.matrices.values() for part in parts]
        rate, decay = arguments.learning_rate, arguments.weight_decay
        self.muon = torch.optim.Muon(everything, rate, decay, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        groups = [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]
        betas = arguments.adam_beta1, arguments.adam_beta2
        self.adamw = torch.optim.AdamW(groups, rate, betas, arguments.adam_epsilon)

    @torch.no_grad()
    def step(self) -> None:
        parameters = dict(self.model.named_parameters())
        for name, parts in self.matrices.items():
            for part, grad in zip(parts, matrices_of(name, parameters[name].grad), strict=True):
                part.grad = grad.reshape(part.shape)
        self.muon.step()
        self.adamw.step()
        for name, parts in self.matrices.items():
            for place, part in zip(matrices_of(name, parameters[name]), parts, strict=True):
                place.copy_(part.view(place.shape))

    def zero_grad(self) -> None:
        self.model.zero_grad()
