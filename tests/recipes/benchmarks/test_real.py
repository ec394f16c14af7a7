"""What a conversion of a real model keeps, and what it costs, with a tiny one."""

import json

import pytest
import real
import real_cost

from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.tiny import tiny_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    model = tiny_model("llama", vocab_size=257, max_position_embeddings=1024, initializer_range=0.2)
    return str(save_with_tokenizer(model, tmp_path_factory.mktemp("tiny")))


@pytest.mark.slow
def test_the_page_has_every_way_and_an_interrupted_run_continues(checkpoint, text, tmp_path, monkeypatch):
    monkeypatch.setattr(real, "JUDGED", 1)
    monkeypatch.setattr(real, "CALIBRATED", 4)
    command = ["--model", checkpoint, "--text", text, "--others", text, "--out", str(tmp_path / "found")]
    page = real.main(command)
    assert (tmp_path / "found.md").read_text() == page
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert [row["way"] for row in rows] == ["own", *real.WAYS]
    for name in real.WAYS:
        assert f"\n| {name} | " in page
    monkeypatch.setattr(real.Comparison, "kept", None)
    assert real.main(command) == page  # from the log


@pytest.mark.slow
def test_the_page_of_costs_has_the_jobs_and_every_model(checkpoint, text, tmp_path, monkeypatch):
    monkeypatch.setattr(real_cost, "JOBS", ("load", "pass", "`convert_checkpoint`"))  # a process each
    command = ["--model", checkpoint, "--text", text, "--size", "quick", "--out", str(tmp_path / "found")]
    page = real_cost.main(command)
    assert (tmp_path / "found.md").read_text() == page
    for name in (real_cost.PLAIN, *real_cost.SCHEMES):
        assert page.count(f"\n| training step, {name} |") == page.count(f"\n| 10 steps of generation, {name} |") == 1
    jobs = page.partition("## Jobs, 512 tokens")[2]
    names = [line.split(" | ")[0] for line in jobs.splitlines() if line.startswith("| ")]
    assert names == ["| job", *(f"| {job}" for job in real_cost.JOBS)]
