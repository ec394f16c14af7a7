"""Small models for Liger's kernels, their training steps, and the comparison of two steps."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_qknorm import Scheme, patch_model
from qknorm_tests.tables import applies, assert_near, randomise, sharp_model
from qknorm_tests.tiny import TINY

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 1e-4  # relative, fp32: Liger's kernels sum in another order


def scheme_of(model_type: str) -> Scheme:
    scheme = Scheme(q="auto", k="auto", gain="per_head", softcap=2.0)
    return scheme if applies(model_type, scheme) else Scheme(softcap=2.0)


def unpatched(model_type: str) -> PreTrainedModel:
    layers = {"num_hidden_layers": 1} if model_type == "mixtral" else {}  # its experts take long to interpret
    model: Any = sharp_model(model_type, **layers)
    return model.to(DEVICE)


def patched(model_type: str = "llama", scheme: Scheme | str | None = None) -> PreTrainedModel:
    return patch(unpatched(model_type), scheme or scheme_of(model_type))


def patch(model: PreTrainedModel, scheme: Scheme | str) -> PreTrainedModel:
    patch_model(model, scheme)
    randomise(model)
    return model


def tokens() -> Tensor:
    return torch.randint(3, TINY["vocab_size"], (1, 6), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def step(model: PreTrainedModel) -> dict[str, Tensor]:
    """Loss and gradients of a training step, where Liger's loss forms no logits, and the logits of evaluation."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    model.zero_grad()
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "logits": logits(model), **gradients}


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model.eval()(input_ids=tokens()).logits


def assert_same_step(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare tensors by name; single numbers, each of which may be near zero by chance, together over the layers."""
    assert actual.keys() == expected.keys()
    groups: dict[str, list[str]] = {}
    for name, value in expected.items():
        groups.setdefault(name if value.numel() > 1 else re.sub(r"\.\d+\.", ".*.", name), []).append(name)
    for group, names in groups.items():
        pair = (torch.stack([step[name].detach() for name in names]) for step in (actual, expected))
        assert_near(*pair, TOLERANCE, group)
