"""Sequences that are held out from batches."""

from __future__ import annotations

import pytest
import torch

from hf_qknorm.measure.regroup import divided


@pytest.mark.parametrize(
    ("sequences", "bounds", "judging"),
    [
        (1, (4, 9), 1),
        (3, (4, 9), 1),
        (8, (), 1),
        (8, (4, 9), 4),
        (17, (8,), 8),
        (24, (), 3),
        (200, (4, 9), 9),
        (200, (4, 99), 25),
        (200, (4, 99, 121), 61),  # of 2 tokens each
        (200, (4, 99, 500), 99),
        (100, (4, 99, 500), 50),
    ],
)
def test_an_eighth_of_the_sequences_judges_within_bounds(sequences, bounds, judging):
    ids = torch.arange(2 * sequences).view(-1, 2)
    others, judged = divided([{"input_ids": x} for x in torch.split(ids, 5)], *bounds)
    seen = [torch.cat([batch["input_ids"] for batch in part]) if part else ids[:0] for part in (others, judged)]
    assert len(seen[1]) == judging
    assert torch.equal(torch.cat(seen).sort(0).values, ids)
    assert max(len(batch["input_ids"]) for batch in judged) <= 5
