"""QuacK's guarantee: the mean |change| of a logit in a step does not depend on the size of weights and biases."""

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
GROWN = (1.0, 100.0)
DRAWS = 12


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


def heads_of(model: Any, model_type: str, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys `[T, H, D]` of the first layer, without RoPE, for the residual stream `[T, C]`."""
    layer, norm = attention_layers(model, model_type)[0], input_norms(model, model_type)[0]
    q, k = (x[0] for x in FAMILIES[model_type].style.project(layer, norm(hidden)[None])[:2])
    return q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)


@torch.no_grad()
def change(model: Any, model_type: str, optimizer: Any) -> float:
    """The mean |change| of a logit over some steps."""
    hidden = torch.randn(24, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for _ in range(DRAWS):
        before, _, after = logits(model, model_type, hidden), optimizer.step(), logits(model, model_type, hidden)
        found.append((after - before).abs().mean())
    return float(torch.stack(found).mean())


def logits(model: Any, model_type: str, hidden: Tensor) -> Tensor:
    q, k = heads_of(model, model_type, hidden)
    return torch.einsum("thd,shd->hts", q, k)


def moved(model: Any, model_type: str, parts: tuple[str, ...], kind: int) -> list[tuple[Tensor, slice]]:
    """The weights (kind 0) or biases (1) of the first layer's parts, with the rows of their heads."""
    layer = attention_layers(model, model_type)[0]
    rows = [(outputs_first(layer, ROWS[model_type][part][0]), part) for part in parts]
    return [(found[kind], head) for found, part in rows for head in ROWS[model_type][part][1] if len(found) > kind]


@torch.no_grad()
def grow(model: Any, model_type: str, what: str, parts: tuple[str, ...], factor: float) -> None:
    """Make the weights or the biases of parts `factor` times larger."""
    for p, rows in moved(model, model_type, parts, what == "biases"):
        p[rows] *= factor


def tried(model_type: str) -> PreTrainedModel:
    """A copy of a tiny model in fp64, with biases and norms' biases of 0.1 rms, and gains about 1."""
    return copy.deepcopy(_made(model_type))


@cache
def _made(model_type: str) -> PreTrainedModel:
    model = tiny_model(model_type, initializer_range=0.1, num_hidden_layers=1, **SETTINGS.get(model_type, {}))
    generator = torch.Generator().manual_seed(2)
    for name, p in model.named_parameters():
        if ("norm" in name or "ln_" in name) and name.endswith("weight"):
            p.data += 0.2 * torch.randn(p.shape, generator=generator)
    return model.double()


SETTINGS: dict[str, Any] = {"gpt2": {"n_head": 4}}
BIASED = {"gpt2", "gpt_neox", "qwen2"}
CASES = [
    (model_type, what, side)
    for model_type in ("gemma", "gpt2", "gpt_neox", "qwen2")
    for what in ("weights", "biases")
    for side in ("q", "k")
    if what == "weights" or model_type in BIASED
]


def changes(model_type: str, what: str, side: str, kind: int) -> dict[str, list[float]]:
    """For each factor of growth of the other side, the change by a step of one side's weights (kind 0) or biases (1).

    With QuacK, and without.
    """
    own, other = (("q",), ("k",)) if side == "q" else (("k",), ("q",))
    found: dict[str, list[float]] = {"QuacK": [], "plain": []}
    for way, values in found.items():
        for factor in GROWN:
            model = tried(model_type)
            steps = Signs(model, [])
            optimizer = QuacK(steps, model) if way == "QuacK" else steps
            optimizer.step()  # sees the initial sizes
            grow(model, model_type, what, other, factor)
            steps.where = moved(model, model_type, own, kind)
            values.append(change(model, model_type, optimizer))
    return found


@pytest.mark.parametrize(("model_type", "what", "side"), CASES)
def test_a_step_of_weights_changes_logits_alike_whatever_grows(model_type, what, side):
    found = changes(model_type, what, side, 0)
    assert max(found["QuacK"]) < 1.5 * min(found["QuacK"]), found
    assert max(found["plain"]) > 5 * min(found["plain"]), found


@pytest.mark.parametrize(("model_type", "what"), [(m, what) for m, what, side in CASES if m in BIASED and side == "q"])
def test_a_step_of_biases_changes_logits_alike_whatever_grows(model_type, what):
    found = changes(model_type, what, "q", 1)
    assert max(found["QuacK"]) < 1.5 * min(found["QuacK"]), found
    assert max(found["plain"]) > 5 * min(found["plain"]), found


@pytest.mark.parametrize(("model_type", "scheme"), [("qwen3", None), ("llama", "q_norm"), ("llama", "soft_cap")])
def test_a_model_with_norms_gets_one_warning(model_type, scheme, caplog):
    model = tiny_model(model_type)
    if scheme:
        patch_model(model, scheme)
    caplog.clear()
    QuacK(torch.optim.SGD(model.parameters(), 0.1), model)
    assert caplog.text.count("this model norms its queries or keys, and QuacK's") == (scheme != "soft_cap")
