"""QuacK's guarantee: the mean |change| of a logit in a step does not depend on the size of weights, biases, gains."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_qknorm import FAMILIES, QuacK, patch_model
from qknorm_tests.head_rows import ROWS, attention_layers, input_norms, outputs_first
from qknorm_tests.tiny import tiny_model

STEP = 1e-4  # so small that a change is linear in it
DRAWS = 12
SETTINGS: dict[str, Any] = {"deepseek_v3": {"first_k_dense_replace": 1, "attention_bias": True}, "gpt2": {"n_head": 4}}
QUERIES, KEYS = ("uq", "qr"), ("uk", "kr")  # of latent attention
GROWN = {  # what grows beside a step
    "deepseek_v3": ("weights", "norm's gain"),
    "gemma": ("norm's gain",),
    "gpt2": ("weights", "biases", "norm's gain", "norm's bias"),
    "qwen2": ("weights", "biases", "norm's gain"),
}
# model type, parts that step, whether by their biases, parts that grow, what grows of them
CASES = [
    (model_type, *((own, False, other) if side else (other, False, own)), what)
    for model_type, kinds in GROWN.items()
    for own, other in [(QUERIES, KEYS) if model_type == "deepseek_v3" else (("q",), ("k",))]
    for side in (True, False)
    for what in kinds
]
CASES += [("gpt2", ("q",), True, ("k",), what) for what in GROWN["gpt2"]]
DOWN = [
    ("deepseek_v3", (part,), False, grown, "weights")
    for part in ("dq", "dkv")
    for grown in (QUERIES + KEYS, ("dq", "dkv"))
]


class Signs(torch.optim.Optimizer):
    """Steps of ±STEP on some parameters, with random signs: the size of Adam's."""

    def __init__(self, model: nn.Module, where: list[tuple[Tensor, slice]]) -> None:
        super().__init__(model.parameters(), {})
        self.where, self.generator = where, torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, rows in self.where:
            signs = torch.randint(0, 2, p[rows].shape, generator=self.generator, dtype=p.dtype)
            p[rows] += STEP * (2 * signs - 1)


def logits(model: Any, model_type: str, hidden: Tensor) -> Tensor:
    """The logits of the first layer, without RoPE, for the residual stream `[T, C]`."""
    layer, norms = attention_layers(model, model_type)[0], input_norms(model, model_type)[0]
    if "uq" in norms:
        x = norms["dq"](hidden)
        latent, turned = layer.kv_a_proj_with_mqa(x).split([layer.kv_lora_rank, layer.qk_rope_head_dim], dim=-1)
        q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x))).view(len(x), -1, layer.qk_head_dim)
        k = layer.kv_b_proj(layer.kv_a_layernorm(latent)).view(*q.shape[:2], -1)[..., : layer.qk_nope_head_dim]
        k = torch.cat((k, turned[:, None].expand(-1, q.shape[1], -1)), -1)
    else:
        q, k = (x[0] for x in FAMILIES[model_type].style.project(layer, norms["q"](hidden)[None])[:2])
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return torch.einsum("thd,shd->hts", q, k)


@torch.no_grad()
def change(model: Any, model_type: str, optimizer: Any) -> float:
    """The mean |change| of a logit over some steps."""
    hidden = torch.randn(24, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for _ in range(DRAWS):
        before, _, after = logits(model, model_type, hidden), optimizer.step(), logits(model, model_type, hidden)
        found.append((after - before).abs().mean())
    return float(torch.stack(found).mean())


def moved(model: Any, model_type: str, parts: tuple[str, ...], biases: bool) -> list[tuple[Tensor, slice]]:
    """The weights or biases of the first layer's parts, with the rows of their heads."""
    layer = attention_layers(model, model_type)[0]
    rows = [(outputs_first(layer, ROWS[model_type][part][0]), part) for part in parts]
    return [(found[biases], head) for found, part in rows for head in ROWS[model_type][part][1] if len(found) > biases]


@torch.no_grad()
def grow(model: Any, model_type: str, what: str, parts: tuple[str, ...], factor: float) -> None:
    """Make the weights or the biases of parts, or the gain or bias of the norm before them, `factor` times larger."""
    norms = input_norms(model, model_type)[0]
    if what in ("weights", "biases"):
        for p, rows in moved(model, model_type, parts, what == "biases"):
            p[rows] *= factor
    for norm in {norms[part] for part in parts} if what.startswith("norm") else ():
        p = norm.weight if what == "norm's gain" else norm.bias
        one = float(FAMILIES[model_type].gain_plus_one and what == "norm's gain")
        p.copy_((p + one) * factor - one)


@cache
def made(model_type: str) -> PreTrainedModel:
    """A tiny model in fp64, with biases and norms' biases of 0.1 rms, and gains about 1."""
    model = tiny_model(model_type, initializer_range=0.1, num_hidden_layers=1, **SETTINGS.get(model_type, {}))
    generator = torch.Generator().manual_seed(2)
    for name, p in model.named_parameters():
        if ("norm" in name or "ln_" in name) and name.endswith("weight"):
            p.data += 0.2 * torch.randn(p.shape, generator=generator)
    return model.double()


@pytest.mark.parametrize(("model_type", "own", "biases", "other", "what"), [*CASES, *DOWN])
def test_a_step_changes_logits_alike_whatever_grows(model_type, own, biases, other, what):
    found: dict[str, list[float]] = {"QuacK": [], "plain": []}
    for way, values in found.items():
        for factor in (1.0, 100.0):
            model = copy.deepcopy(made(model_type))
            steps = Signs(model, [])
            optimizer = QuacK(steps, model) if way == "QuacK" else steps
            optimizer.step()  # sees the initial sizes
            grow(model, model_type, what, other, factor)
            steps.where = moved(model, model_type, own, biases)
            values.append(change(model, model_type, optimizer))
    assert max(found["QuacK"]) < 1.5 * min(found["QuacK"]), found
    if (model_type, own, biases, other, what) in CASES:  # a norm follows the weights down to the latents
        assert max(found["plain"]) > 5 * min(found["plain"]), found


@pytest.mark.parametrize(("model_type", "scheme"), [("qwen3", None), ("llama", "q_norm"), ("llama", "soft_cap")])
def test_a_model_with_norms_gets_one_warning(model_type, scheme, caplog):
    model = tiny_model(model_type)
    if scheme:
        patch_model(model, scheme)
    caplog.clear()
    QuacK(torch.optim.SGD(model.parameters(), 0.1), model)
    assert caplog.text.count("this model norms its queries or keys, and QuacK's") == (scheme != "soft_cap")
