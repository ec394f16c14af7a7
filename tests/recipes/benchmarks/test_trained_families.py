"""Conversions of trained models of each type, at the smallest size, and the promise."""

from __future__ import annotations

import json

import pytest
import trained_families


@pytest.mark.slow
def test_models_are_trained_converted_and_judged(text, tmp_path):
    command = ["--text", text, "--types", "gpt2", "--steps", "2", "--jobs", "1"]
    command += ["--out", str(tmp_path / "found")]
    page = trained_families.main(command)
    assert (tmp_path / "found.md").read_text() == page
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [row["settings"]["type"] for row in rows] == ["gpt2"]
    assert all(row["result"][scheme]["bound"] > 0 for row in rows for scheme in trained_families.DEFAULTS)
    assert trained_families.main(command) == page  # from the log


def test_one_type_of_each_style_without_norms_of_its_own_is_trained():
    types = trained_families.trainable_types()
    assert {"arcee", "gpt2", "opt"} <= {*types}
    assert not {"llama", "qwen3", "bart", "whisper", "vit"} & {*types}


@pytest.mark.parametrize(
    ("largest", "cost", "scheme", "kept"),
    [
        (60.0, 0.005, "qk_norm", True),
        (60.0, 0.0051, "qk_norm", False),
        (49.0, 0.0051, "qk_norm_cap", False),
        (50.0, 0.0051, "qk_norm_cap", None),
    ],
)
@pytest.mark.parametrize("measure", ["rise", "kl"])
def test_the_promise(largest, cost, scheme, kept, measure):
    found = {"largest": largest, scheme: {"rise": -0.001, "kl": 0.0, measure: cost}}
    assert trained_families.kept(found, scheme) is kept
