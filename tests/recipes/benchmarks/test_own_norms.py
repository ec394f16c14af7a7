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


def test_remedies_are_compared_seed_by_seed():
    losses = {"plain": (2.0, 3.0), "cap": (1.9, 2.7), "clip": (2.1, 2.9), "decay": (2.0, 3.0)}
    results = {(0.1, arm): [{"loss": loss} for loss in pair] for arm, pair in losses.items()}
    page = "\n".join(own_norms.remedies(results))
    assert "| 0.1 | -0.200 ± 0.100, 2 of 2 | +0.000 ± 0.100, 1 of 2 | +0.000 ± 0.000, 0 of 2 |" in page
    assert "of all runs is 3.000" in page
