"""Optimisers, and small models to train with them."""

from typing import Any

import torch
from transformers import PreTrainedModel

from qknorm_tests.tables import make_batch, sharp_model

ADAMW = {"lr": 0.2, "weight_decay": 0.1, "eps": 1e-5}  # a smaller eps amplifies the noise in gradients of zero
OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=3.0, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, **ADAMW, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, **ADAMW, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, **ADAMW, fused=True),
}
STEPS = 4


def made(model_type: str, **settings: Any) -> PreTrainedModel:
    """A model with large logits, without experts, which have no fp64."""
    dense = {"first_k_dense_replace": 2} if model_type == "deepseek_v3" else {}
    return sharp_model(model_type, **dense, **settings)


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for _ in range(steps):
        model(**make_batch("plain")).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
