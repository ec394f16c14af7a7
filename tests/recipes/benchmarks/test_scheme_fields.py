"""The comparison of norms over all heads and learned temperatures, at its smallest size."""

from __future__ import annotations

import json

import scheme_fields


def test_all_ways_and_arms_are_compared_and_logged(shared, text, tmp_path):
    checkpoint = str(shared / "checkpoints/llama-shakespeare")
    command = ["--checkpoints", checkpoint, "--known", text, "--text", text, "--size", "quick", "--seeds", "1"]
    command += ["--rates", "0.03", "--out", str(tmp_path / "found")]
    page = scheme_fields.main(command)
    assert (tmp_path / "found.md").read_text() == page
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    pairs = [(width, way) for width in scheme_fields.WIDTHS for way in scheme_fields.WAYS]
    assert [(row["settings"]["width"], row["settings"]["way"]) for row in rows[: len(pairs)]] == pairs
    assert len({row["result"]["rise"] for row in rows[: len(pairs)]}) == len(pairs)
    results = {row["settings"]["arm"]: row["result"] for row in rows[len(pairs) :]}
    assert results.keys() == scheme_fields.ARMS.keys()
    for arm, scheme in scheme_fields.ARMS.items():
        least, most = results[arm]["temperatures"] or (1, 1)
        assert (least < 1 < most) == (scheme.temperature is not None)
    assert len({result["end"] for result in results.values()}) == len(results)
    assert scheme_fields.main(command) == page  # from the log


def test_the_verdicts_follow_the_rules():
    found = {
        ("a", "each head", "auto"): [{"rise": 0.004, "knee": 2.0}, {"rise": 0.014, "knee": 4.0}],
        ("a", "all heads", "auto"): [{"rise": 0.02, "knee": 2.0}],
        ("a", "all heads", "moments"): [{"rise": 0.3, "knee": 0.0}],
    }
    lines = scheme_fields.conversions(found)
    assert "| a | each head | auto | +0.0090 (+0.0040, +0.0140) | 2, 4 |" in lines
    assert "- Norms over each head: by the rule, the conversion keeps what the models knew." in lines
    assert "- Norms over all heads: by the rule, the conversion costs more than 0.01 nats." in lines
    ends = dict(zip(scheme_fields.ARMS, (2.0, 1.5, 1.8, 1.8, 1.9), strict=True))
    results = {
        (0.1, arm): [{"end": end + seed, "logit": 1.0, "temperatures": []} for seed in (0, 1)]
        for arm, end in ends.items()
    }
    lines = scheme_fields.trainings(results)
    assert "- Rate 0.1: temperature less unpatched is -0.5000 ± 0.0000: better." in lines
    assert "- Rate 0.1: qk_norm, temperature less qk_norm is +0.0000 ± 0.0000: level." in lines
    assert lines[-1] == "- Rate 0.1: qk_norm, all heads less qk_norm is +0.1000 ± 0.0000: worse."
