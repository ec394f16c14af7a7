"""QuacK scales each head's steps by what the vectors on the other side grew, exactly."""

import copy
from typing import Any

import pytest
import torch

from hf_qknorm import QuacK
from qknorm_tests.head_rows import ROWS, attention_layers, outputs_first
from qknorm_tests.optimised import OPTIMISERS, made
from qknorm_tests.tables import make_batch

TAU, GROWTH = 0.5, 1000.0
# what grows in the heads of the first group → the parts whose steps shrink there
OTHER = {"k": "q", "q": "k", "uk": "uq", "uq": "uk"}
CASES = [
    *((model_type, "adamw", grown) for model_type, rows in ROWS.items() for grown in OTHER if grown in rows),
    *(("gpt2", kind, "k") for kind in OPTIMISERS if kind != "adamw"),
]


def parts_of(model: Any, model_type: str, parts: list[str]) -> dict[str, list[list[torch.Tensor]]]:
    """By part, the weights and biases of each head in all layers."""
    return {
        part: [
            [p[rows] for layer in attention_layers(model, model_type) for p in outputs_first(layer, where)]
            for rows in heads
        ]
        for part, (where, heads) in ROWS[model_type].items()
        if part in parts
    }


@pytest.mark.parametrize(("model_type", "kind", "grown"), CASES)
@torch.no_grad()
def test_steps_are_scaled_by_head(model_type, kind, grown):
    model = made(model_type).double()
    optimizer = QuacK(OPTIMISERS[kind](model.parameters()), model, tau=TAU)
    with torch.enable_grad():
        model(**make_batch("plain")).loss.backward()
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()  # sees the initial sizes
    shrunk = OTHER[grown]
    parts = parts_of(model, model_type, [grown, shrunk])
    groups = min(len(heads) for heads in parts.values())
    for head in parts[grown][: len(parts[grown]) // groups]:
        for p in head:
            p *= GROWTH
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    before = copy.deepcopy(parts)
    plain_model, plain = copy.deepcopy((model, optimizer.optimizer))
    for p, own in zip(plain_model.parameters(), model.parameters(), strict=True):
        p.grad = own.grad
    optimizer.step()
    plain.step()
    for part, heads in parts_of(plain_model, model_type, [grown, shrunk]).items():
        for number, head in enumerate(heads):
            first = part == shrunk and number < len(heads) // groups
            for p, own, old in zip(head, parts[part][number], before[part][number], strict=True):
                scale = TAU / GROWTH if first else TAU
                torch.testing.assert_close(own, old + scale * (p - old), rtol=1e-9, atol=1e-12)
                assert not torch.equal(p, old)
