"""The comparison of remedies for models with norms of their own, at its smallest size."""

from __future__ import annotations

import json

import own_norms


def test_all_arms_are_compared_and_logged(text, tmp_path):
    command = ["--text", text, "--size", "quick", "--seeds", "2", "--rates", "0.3", "--out", str(tmp_path / "found")]
    page = own_norms.main(command)
    assert (tmp_path / "found.md").read_text() == page
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [row["settings"]["arm"] for row in rows] == [*own_norms.ARMS] * 2
    results = {row["settings"]["arm"]: row["result"] for row in rows}
    assert len({result["loss"] for result in results.values()}) >= 3  # a cap may change nothing here
    assert results["clip"]["max_gain"] <= own_norms.LARGEST_GAIN
    assert own_norms.main(command) == page  # from the log
    assert all(f"| 0.3 | {arm} |" in page for arm in own_norms.ARMS)
