"""The comparison of norms of latent attention, at its smallest size."""

from __future__ import annotations

import json

import latent_norms
import pytest


def test_all_ways_and_arms_are_compared_and_logged(text, tmp_path):
    command = ["--text", text, "--size", "quick", "--seeds", "2", "--out", str(tmp_path / "found")]
    page = latent_norms.main(command)
    assert (tmp_path / "found.md").read_text() == page
    rows = [json.loads(line)["result"] for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [list(row["ways"]) for row in rows] == [[*latent_norms.WAYS]] * 2
    assert [list(row["arms"]) for row in rows] == [[*latent_norms.ARMS]] * 2
    assert all(row["ways"][f"moments, knee {knee}"]["knee"] == knee for row in rows for knee in (2, 4))
    assert latent_norms.main(command) == page  # from the log


@pytest.mark.parametrize(("left", "word"), [((0.01, 0.1), "works"), ((0.01, 0.11), "fails")])
def test_calibration_works_if_every_seed_keeps_to_the_rule(left, word):
    results = [{"ways": {"auto": {"rise": share}, "fresh gains": {"rise": 1.0}}} for share in left]
    assert latent_norms.verdict(results).endswith(f"by the rule calibration {word}.")
