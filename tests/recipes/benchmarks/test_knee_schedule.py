"""The comparison of KneeSchedule and BlendSchedule: its rule, and a run at its smallest size."""

from __future__ import annotations

import json
from typing import Any

import knee_schedule
import pytest
from knee_schedule import ARMS, END, WAY, Compared, Size
from tiny import tiny_model

from hf_qknorm.demo.training import byte_tokenizer


def runs(*pairs: tuple[float, float]) -> list[dict[str, Any]]:
    return [{"way": [way], "end": end} for way, end in pairs]


@pytest.mark.parametrize(
    ("knee", "literal", "kept"),
    [
        (((2.0, 2.0), (2.0, 2.0)), True, True),
        (((2.0, 2.002), (2.004, 2.002)), True, True),
        (((2.0, 2.004), (2.0, 2.004)), False, False),  # worse at the end, by every seed
        (((2.006, 2.0), (2.006, 2.0)), False, False),  # worse on the way
        (((2.0, 2.1), (2.0, 1.95)), False, True),  # worse by less than the seeds differ
        (((2.1, 2.0), (1.95, 2.0)), False, True),
        (((1.9, 1.9), (1.9, 1.9)), True, True),
        (((2.0, 2.004),), False, False),  # one seed has no error that would let it pass
    ],
)
def test_the_rule(knee, literal, kept):
    found = Compared("", blend=runs(*[(2.0, 2.0)] * len(knee)), knee=runs(*knee))
    assert (found.literal, found.kept) == (literal, kept)
    assert ("allowed on the way" in "\n".join(knee_schedule.misses([found], Size()))) is not kept
    for limit in (END, WAY):
        assert f"{limit:g}" in knee_schedule.__doc__


def test_both_arms_are_compared_and_logged(text, tmp_path):
    tiny_model("llama", vocab_size=257).save_pretrained(tmp_path / "tiny")
    byte_tokenizer().save_pretrained(tmp_path / "tiny")
    command = ["--checkpoints", str(tmp_path / "tiny"), "--text", text, "--size", "quick", "--seeds", "2"]
    command += ["--rates", "0.001", "--out", str(tmp_path / "out")]
    (first,) = knee_schedule.main(command)
    kept = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["settings"]["arm"] for row in kept] == 2 * list(ARMS)
    assert all(len(run["way"]) == 2 for run in (*first.blend, *first.knee))
    assert "by the rule the blend" in (tmp_path / "out.md").read_text()
    assert knee_schedule.main(command) == [first]
