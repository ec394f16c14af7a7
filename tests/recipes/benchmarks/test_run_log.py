"""The log of finished runs: one line for each run, whoever writes it, and whatever stops it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from run_log import Runs


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_two_writers_of_a_log_store_each_run_once(tmp_path):
    first, second = (Runs(tmp_path / "runs.jsonl") for _ in range(2))
    assert first.get({"rate": 1}, lambda: {"loss": 1}) == {"loss": 1}
    assert second.get({"rate": 1}, lambda: {"loss": 2}) == {"loss": 1}
    second.get({"rate": 2}, lambda: {"loss": 2})
    first.get({"rate": 3}, lambda: {"loss": 3})
    assert [row["settings"]["rate"] for row in rows(tmp_path / "runs.jsonl")] == [1, 2, 3]


def test_a_line_of_a_killed_writer_is_cut_off(tmp_path):
    path = tmp_path / "runs.jsonl"
    Runs(path).get({"rate": 1}, lambda: {"loss": 1})
    with path.open("a") as file:
        file.write('{"settings": {"ra')
    runs = Runs(path)
    runs.get({"rate": 2}, lambda: {"loss": 2})
    assert [row["settings"]["rate"] for row in rows(path)] == [1, 2]


def test_a_run_that_fails_does_not_lose_the_others(tmp_path):
    runs = Runs(tmp_path / "runs.jsonl")
    with pytest.raises(ZeroDivisionError):
        runs.run_all([{"x": 0}, {"x": 1}], partial(eval, "{'y': 1 / x}"), jobs=2)
    assert runs.find({"x": 1}) == {"y": 1.0}
