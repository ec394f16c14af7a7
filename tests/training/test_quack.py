"""QuacK's steps are those of the published rule, computed head by head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_qknorm import QuacK
from qknorm_tests.head_rows import ROWS, attention_layers, outputs_first, size_by_hand
from qknorm_tests.optimised import OPTIMISERS, assert_same, made, train
from qknorm_tests.tables import sharp_model
from qknorm_tests.tiny import tiny_model

CASES = [*((model_type, "adamw") for model_type in ROWS), *(("gpt2", kind) for kind in OPTIMISERS if kind != "adamw")]
Norms = dict[str, list[float]]


def by_hand(sizes: Norms) -> Norms:
    """The rates, computed head by head."""
    if "q" in sizes:
        group = len(sizes["q"]) // len(sizes["k"])
        return {
            "q": [1 / sizes["k"][h // group] for h in range(len(sizes["q"]))],
            "k": [1 / max(sizes["q"][g * group : (g + 1) * group]) for g in range(len(sizes["k"]))],
        }
    uq, uk, qr = sizes["uq"], sizes["uk"], sizes["qr"]
    (dkv,), (kr,), (dq,) = sizes["dkv"], sizes["kr"], sizes["dq"]
    largest = max(a * b for a, b in zip(uq, uk, strict=True))
    return {
        "uq": [1 / k for k in uk],
        "uk": [1 / q for q in uq],
        "qr": [1 / kr] * len(qr),
        "dq": [min(dq / largest, dq / (max(qr) * kr))],
        "dkv": [dkv / largest],
        "kr": [1 / max(qr)],
    }


class ByHand:
    """The rule as loops over heads around an optimiser's step."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, model_type: str, tau: float) -> None:
        self.optimizer, self.model_type, self.rows, self.tau = optimizer, model_type, ROWS[model_type], tau
        self.layers = attention_layers(model, model_type)
        self.first = [self.rates(layer) for layer in self.layers]
        self.scales: list[float] = []

    def rates(self, layer: Any) -> Norms:
        """By part, a rate per head."""
        return by_hand(
            {
                part: [size_by_hand(layer, part, rows, self.model_type) for rows in heads]
                for part, (_, heads) in self.rows.items()
            }
        )

    def step(self) -> None:
        now = [self.rates(layer) for layer in self.layers]
        old = [[[p.clone() for p in outputs_first(x, where)] for where, _ in self.rows.values()] for x in self.layers]
        self.optimizer.step()
        for layer, rates, first, before in zip(self.layers, now, self.first, old, strict=True):
            for (part, (where, heads)), was in zip(self.rows.items(), before, strict=True):
                for head, rows in enumerate(heads):
                    scale = self.tau * rates[part][head] / first[part][head]
                    self.scales.append(scale)
                    for p, start in zip(outputs_first(layer, where), was, strict=True):  # a weight, and maybe a bias
                        p[rows] = (start[rows] + scale * (p[rows].double() - start[rows].double())).to(p.dtype)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


@pytest.mark.parametrize(("model_type", "kind"), CASES)
@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_steps_equal_the_rule_head_by_head(model_type, kind, tau):
    model, expected, plain = (made(model_type).double() for _ in range(3))
    slow = ByHand(OPTIMISERS[kind](expected.parameters()), expected, model_type, tau)
    train(model, QuacK(OPTIMISERS[kind](model.parameters()), model, tau=tau))
    train(expected, slow)
    train(plain, OPTIMISERS[kind](plain.parameters()))
    assert max(slow.scales) / min(slow.scales) > 1.3
    where = ROWS[model_type]["q" if "q" in ROWS[model_type] else "uq"][0]
    moved = 0.0
    for (name, p), other, without in zip(
        model.named_parameters(), expected.parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(p, other, rtol=1e-9, atol=1e-9, msg=name)
        moved += float((p - without).detach().norm()) if where in name else 0.0
    assert moved > 0.1


def test_bfloat16_rounds_once():
    model, expected = (sharp_model("llama").bfloat16() for _ in range(2))
    slow = ByHand(OPTIMISERS["adamw"](expected.parameters()), expected, "llama", tau=0.5)
    train(model, QuacK(OPTIMISERS["adamw"](model.parameters()), model, tau=0.5), steps=1)
    train(expected, slow, steps=1)
    for (name, p), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert float((p != other).float().mean()) < 1e-3, name  # fp32 and fp64 differ in ties alone


def test_the_steps_beside_a_frozen_side_are_unscaled():
    model, plain = tiny_model("llama"), tiny_model("llama")
    for part in (model, plain):
        for layer in part.model.layers:
            layer.self_attn.k_proj.weight.requires_grad_(False)
            layer.input_layernorm.weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    train(model, QuacK(torch.optim.AdamW(trained, 1e-2), model))
    train(plain, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], 1e-2))
    assert_same(model, plain)
