"""The study of norms that come off after training, at its smallest size, and its rule."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import seat_belt
from tiny import tiny_model

from hf_qknorm.demo.training import byte_tokenizer


def test_all_arms_are_trained_and_lose_their_norms(text, tmp_path):
    tokenizer = byte_tokenizer()
    for saved in (tiny_model("llama", vocab_size=len(tokenizer)), tokenizer):
        saved.save_pretrained(tmp_path / "tiny")
    asked = ["--checkpoint", str(tmp_path / "tiny"), "--text", text, "--size", "quick"]
    command = [*asked, "--seeds", "2", "--rates", "0.01", "--out", str(tmp_path / "found")]
    page = seat_belt.main(command)
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [row["settings"]["arm"] for row in rows] == [*seat_belt.ARMS] * 2
    assert all(math.isfinite(value) for row in rows for value in row["result"].values())
    assert seat_belt.main(command) == page  # from the log


@pytest.mark.parametrize("arm", seat_belt.OPENINGS)
def test_knees_open_to_the_end(arm):
    knees = [seat_belt.opened(arm, step, 100) for step in range(101)]
    assert knees[0] == pytest.approx(seat_belt.KNEE)
    assert knees == sorted(knees)
    assert knees[-1] >= 10 * seat_belt.KNEE * (1 - 1e-9)


def test_the_best_opening_that_keeps_the_promise_is_recommended():
    ends = {"unpatched": 2.0, "kept": 1.0, "last quarter": 1.9, "last half": 1.8, "by the rate": 1.7}
    costs = {"by the rate": 0.006}
    rows = {
        (0.01, arm): [{"before": end + seed, "after": end + seed + costs.get(arm, 0.0)} for seed in (0, 0.01)]
        for arm, end in (ends | {"KneeSchedule": 1.85}).items()
    }
    lines = seat_belt.verdicts(SimpleNamespace(rates=[0.01]), rows)
    assert "- by the rate: does not keep the promise (worst cost 0.0060)." in lines
    assert lines[-1] == '- By the rule, "last half" is recommended.'
