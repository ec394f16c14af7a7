"""The costs of a real model's conversion, at the smallest size, with a tiny one."""

from __future__ import annotations

import pytest
import real_cost

from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.tiny import tiny_model


@pytest.mark.slow  # eleven processes
def test_the_page_has_every_job_and_model(tmp_path, text):
    save_with_tokenizer(tiny_model("llama", vocab_size=257, max_position_embeddings=1024), tmp_path / "tiny")
    command = ["--model", str(tmp_path / "tiny"), "--text", text, "--size", "quick", "--out", str(tmp_path / "found")]
    page = real_cost.main(command)
    assert (tmp_path / "found.md").read_text() == page
    for name in (real_cost.PLAIN, *real_cost.SCHEMES):
        assert page.count(f"\n| training step, {name} |") == page.count(f"\n| token, {name} |") == 2
    jobs = page.partition("## Jobs, 512 tokens")[2]
    assert [line.split(" | ")[0] for line in jobs.splitlines() if line.startswith("| ")] == [
        "| job", "| load", "| pass", "| `calibrate`", "| `hf-qknorm inspect`", "| `hf-qknorm convert`",
    ]  # fmt: skip
