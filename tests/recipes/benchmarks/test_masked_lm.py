"""The comparison of a masked language model before and after its conversion, at its smallest size."""

from __future__ import annotations

import json

import masked_lm
import torch


def test_all_arms_are_compared_and_logged(text, tmp_path):
    folders = ["--work", str(tmp_path / "base.pt"), "--out", str(tmp_path / "found")]
    command = ["--known", text, "--text", text, "--size", "quick", "--seeds", "2", "--rates", "0.1", *folders]
    page = masked_lm.main(command)
    assert (tmp_path / "found.md").read_text() == page
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [row["settings"]["arm"] for row in rows] == [*masked_lm.ARMS] * 2
    ends = {row["settings"]["arm"]: row["result"]["end"] for row in rows}
    assert len(set(ends.values())) >= 3  # without a knee to lower, the last two are one
    assert masked_lm.main(command) == page  # from the log, and the stored model


def test_every_sequence_has_as_many_masked_tokens_and_labels():
    ids = torch.arange(40).view(2, 20)
    batch = masked_lm.masked(ids, 5, 99, seed=0)
    hidden = batch["input_ids"] == 99
    assert hidden.sum(1).tolist() == [5, 5]
    assert torch.equal(batch["labels"][hidden], ids[hidden])
    assert (batch["labels"][~hidden] == masked_lm.IGNORED).all()
    assert torch.equal(batch["input_ids"][~hidden], ids[~hidden])
    assert not torch.equal(hidden, masked_lm.masked(ids, 5, 99, seed=1)["input_ids"] == 99)
