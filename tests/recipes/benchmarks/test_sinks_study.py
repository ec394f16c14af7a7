"""The study of learned sinks, at its smallest size."""

from __future__ import annotations

import json

import pytest
import sinks


def test_all_arms_are_run_and_logged(shared, text, tmp_path):
    source = str(shared / "checkpoints/llama-shakespeare")
    command = ["--checkpoint", source, "--text", text, "--size", "quick", "--seeds", "1"]
    command += ["--out", str(tmp_path / "found")]
    page = sinks.main(command)
    assert (tmp_path / "found.md").read_text() == page
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [row["settings"]["start"] for row in rows[: len(sinks.STARTS)]] == [*sinks.STARTS]
    results = {row["settings"]["arm"]: row["result"] for row in rows[len(sinks.STARTS) :]}
    assert results.keys() == sinks.ARMS.keys()
    assert results["none"]["share"] == pytest.approx(0, abs=1e-6)
    assert results["0, 30 times the rate"]["share"] > results["start, same rate"]["share"] > 0
    assert results["start, 30 times the rate"]["moved"] > 10 * results["start, same rate"]["moved"]
    assert sinks.main(command) == page  # from the log
