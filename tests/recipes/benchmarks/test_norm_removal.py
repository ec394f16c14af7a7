"""The comparison of ways to remove norms, at its smallest size."""

from __future__ import annotations

import json

import norm_removal


def test_all_arms_are_compared_and_end_without_norms(text, tmp_path):
    folders = ["--work", str(tmp_path / "base.pt"), "--out", str(tmp_path / "found")]
    command = ["--text", text, "--size", "quick", "--seeds", "2", "--rates", "0.03", *folders]
    page = norm_removal.main(command)
    assert (tmp_path / "found.md").read_text() == page
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [row["settings"]["arm"] for row in rows] == [*norm_removal.ARMS] * 2
    results = {row["settings"]["arm"]: row["result"] for row in rows}
    types = {arm: "Qwen3ForCausalLM" if arm == "kept" else "LlamaForCausalLM" for arm in norm_removal.ARMS}
    assert {arm: result["type"] for arm, result in results.items()} == types
    assert len({result["end"] for result in results.values()}) == len(norm_removal.ARMS)
    assert results["knee"]["way"][0] == results["gate"]["way"][0] != results["at once"]["way"][0]
    assert norm_removal.main(command) == page  # from the log, and the stored model


def test_the_verdicts_follow_the_rule():
    losses = {"kept": (2.0, 2.0), "at once": (2.5, 2.6), "gate": (2.1, 2.2), "knee": (2.3, 2.4)}
    results = {(0.1, arm): [{"end": loss} for loss in pair] for arm, pair in losses.items()}
    lines = norm_removal.verdicts(results)
    assert lines[0] == "- Rate 0.1: knee less gate is +0.2000 ± 0.0000: worse."
    assert lines[-1] == "- By the rule, the knee is worse than the gate."
