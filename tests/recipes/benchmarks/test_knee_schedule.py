"""The comparison of KneeSchedule and BlendSchedule: its rule, and a run at its smallest size."""

from __future__ import annotations

import json
from typing import Any

import knee_schedule
import pytest
from knee_schedule import ARMS, Compared
from tiny import tiny_model

from hf_qknorm.demo.training import byte_tokenizer


def runs(*pairs: tuple[float, float]) -> list[dict[str, Any]]:
    return [{"way": [way, 2.0], "end": end} for way, end in pairs]


def start(apart: float) -> dict[str, dict[str, float]]:
    return {"tiny": {"unpatched": 2.0, "cap alone": 2.1, "knee": 2.1 + apart, "calibrated": 3.0}}


@pytest.mark.parametrize(
    ("apart", "knee", "kept", "literal"),
    [
        (0.0, ((2.0, 2.0), (2.0, 2.0)), "abc", "abc"),
        (0.0, ((1.9, 1.9), (1.9, 1.9)), "abc", "abc"),
        (0.0029, ((2.005, 2.0029), (2.005, 2.0029)), "abc", "abc"),
        (0.0031, ((2.0, 2.0), (2.0, 2.0)), "bc", "bc"),
        (0.0, ((2.0, 2.0031), (2.0, 2.0031)), "ac", "ac"),  # worse at the end, by every seed
        (0.0, ((2.007, 2.0), (2.007, 2.0)), "ab", "ab"),  # worse on the way, on average over its two looks
        (0.0, ((2.0, 2.1), (2.0, 1.95)), "abc", "ac"),  # worse by less than twice the standard error
        (0.0, ((2.1, 2.0), (1.95, 2.0)), "abc", "ab"),
        (0.0, ((2.0, 2.004), (2.0, 2.012)), "abc", "ac"),  # 0.008 ± 0.004
        (0.0, ((2.0, 2.0045), (2.0, 2.012)), "ac", "ac"),
        (0.0, ((2.0, 2.004),), "ac", "ac"),  # one seed has no error that would let it pass
        (0.0, ((2.0, float("nan")), (2.0, 2.0)), "ac", "ac"),
    ],
)
def test_the_rule(apart, knee, kept, literal):
    cell = Compared("cell", blend=runs(*[(2.0, 2.0)] * len(knee)), knee=runs(*knee))
    found = knee_schedule.conditions(start(apart), [cell])
    for kind, expected in enumerate((kept, literal)):
        assert "".join(name[1] for name, broken in found.items() if not broken[kind]) == expected
    page = knee_schedule.page(start(apart), [cell], "")
    assert f"By the rule the blend {'goes' if kept == 'abc' else 'stays'}" in page
    assert f"without the allowance it would {'go' if literal == 'abc' else 'stay'}." in page
    assert f"{knee_schedule.LIMIT:g}" in knee_schedule.__doc__


def test_both_arms_are_compared_and_logged(text, tmp_path):
    tiny_model("llama", vocab_size=257).save_pretrained(tmp_path / "tiny")
    byte_tokenizer().save_pretrained(tmp_path / "tiny")
    command = ["--models", f"{tmp_path / 'tiny'}={text}", "--size", "quick", "--out", str(tmp_path / "out")]
    page = knee_schedule.main(command)
    first, *kept = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert first["result"].keys() == {"unpatched", "cap alone", "knee", "calibrated", "sharpness"}
    assert [row["settings"]["arm"] for row in kept] == 2 * list(ARMS)
    assert all(len(row["result"]["way"]) == 2 for row in kept)
    assert (tmp_path / "out.md").read_text() == page
    assert knee_schedule.main(command) == page  # from the log
