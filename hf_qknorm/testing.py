"""Helpers for tests, here and in projects that build on this one: inputs, tiny models, and the error budget."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from hf_qknorm.families.tiny import TINY, TINY_BY_TYPE


def make_qkv(
    batch: int,
    heads: int,
    heads_kv: int,
    queries: int,
    keys: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    spread: float = 1.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q `[B, H, T, D]` and k, v `[B, Hk, S, D]` that need gradients; `spread` is the deviation of q and k."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, length: int, factor: float) -> Tensor:
        x = torch.randn(batch, heads, length, head_dim, generator=generator, dtype=torch.float64) * factor
        return x.to(dtype).requires_grad_()

    return draw(heads, queries, spread), draw(heads_kv, keys, spread), draw(heads_kv, keys, 1.0)


def tiny_config(model_type: str, **settings: Any) -> PretrainedConfig:
    """The config of `tiny_model`."""
    return CONFIG_MAPPING[model_type](**{**TINY, **TINY_BY_TYPE.get(model_type, {}), **settings})


def tiny_model(model_type: str, *, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A causal LM of `model_type` with random weights and two small layers, in eval mode; `settings` override."""
    config = tiny_config(model_type, **settings)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # biases start at zero: a test must see them
                torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def error(actual: Tensor, exact: Tensor) -> float:
    """The relative error of `actual` in the Frobenius norm."""
    exact = exact.double()
    return float((actual.double() - exact).norm() / exact.norm().clamp_min(torch.finfo(torch.float64).tiny))


def assert_within_budget(actual: Tensor, exact: Tensor, eager: Tensor, what: str = "result") -> None:
    """Fail unless err(actual) ≤ 2·err(eager) + one rounding of the output, both against `exact` in fp64.

    `eager` is the plain computation in the dtype of `actual`, on the same rounded inputs.
    """
    if not torch.isfinite(actual).all():
        raise AssertionError(f"{what}: not finite")
    budget = 2 * error(eager, exact) + torch.finfo(actual.dtype).eps
    got = error(actual, exact)
    if got > budget:
        raise AssertionError(f"{what}: relative error {got:.2e} is over the budget of {budget:.2e}")
