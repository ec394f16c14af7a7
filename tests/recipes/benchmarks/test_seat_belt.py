"""The study of norms that come off after training, at its smallest size, and its rule."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import seat_belt

from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.tiny import tiny_model


@pytest.mark.slow
def test_all_arms_are_trained_and_lose_their_norms(text, tmp_path):
    save_with_tokenizer(tiny_model("llama", vocab_size=257), tmp_path / "tiny")
    asked = ["--checkpoint", str(tmp_path / "tiny"), "--text", text, "--size", "quick"]
    command = [*asked, "--seeds", "2", "--rates", "0.01", "--out", str(tmp_path / "found")]
    page = seat_belt.main(command)
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [row["settings"]["arm"] for row in rows] == [*seat_belt.ARMS] * 2
    assert all(math.isfinite(value) for row in rows for value in row["result"].values())
    assert seat_belt.main(command) == page  # from the log


def test_an_arm_keeps_the_promise_if_its_removal_costs_little_at_every_rate():
    costs = {"kept": 0.006, "KneeSchedule": 0.004}
    rows = {
        (rate, arm): [{"before": seed, "after": seed + cost * (rate == 0.01)} for seed in (0.0, 0.01)]
        for rate in (0.001, 0.01)
        for arm, cost in costs.items()
    }
    assert seat_belt.verdicts(SimpleNamespace(rates=[0.001, 0.01]), rows) == [
        "- kept: does not keep the promise (worst cost 0.0060).",
        "- KneeSchedule: keeps the promise (worst cost 0.0040).",
    ]
