"""Sequences that are held out from batches."""

from __future__ import annotations

import pytest
import torch

from hf_qknorm.measure.regroup import divided


@pytest.mark.parametrize(
    ("sequences", "least", "most", "judging"),
    [(1, 4, 9, 1), (3, 4, 9, 1), (8, 1, None, 1), (8, 4, 9, 4), (24, 1, None, 3), (200, 4, 9, 9), (200, 4, 99, 25)],
)
def test_an_eighth_of_the_sequences_judges(sequences, least, most, judging):
    ids = torch.arange(2 * sequences).view(-1, 2)
    others, judged = divided([{"input_ids": x} for x in torch.split(ids, 5)], least, most)
    seen = [torch.cat([batch["input_ids"] for batch in part]) if part else ids[:0] for part in (others, judged)]
    assert len(seen[1]) == judging
    assert torch.equal(torch.cat(seen).sort(0).values, ids)
    assert max(len(batch["input_ids"]) for batch in judged) <= 5
