"""The measurement of long context: its rules on made-up numbers, its tasks, and a run at its smallest size."""

from __future__ import annotations

import json
from typing import Any

import long_context
import long_context_training
import pytest
import torch
from long_context_page import BASE, COPIES, LOSS, SHARE, conclusions, copies, copying_table, loses_context
from long_context_tasks import KINDS, Draw
from tiny import tiny_model

from hf_qknorm.demo.training import byte_tokenizer


def run(*losses: tuple[float, float], right: float = 1.0) -> dict[str, Any]:
    """Two stretches of positions, one beyond the trained length of 4; two rows of copying over one distance."""
    copied = {"first": [4.0] * 2, "second": [0.0] * 2, "right_first": [0.0] * 2, "right": [right] * 2}
    return {"knee": 0.0, "edges": [0, 4, 8], "losses": list(losses), "copying": {"random": {"8": copied}}}


@pytest.mark.parametrize(
    ("losses", "lost"),
    [
        (((1.0, 2.0), (1.0, 2.0)), False),
        (((1.5, 2.5), (1.5, 2.5)), False),  # worse everywhere, by the same
        (((1.0, 2.1), (1.0, 2.1)), True),
        (((1.0, 2.005), (1.0, 2.005)), False),  # less than the rule asks
        (((1.0, 2.3), (1.0, 1.8)), False),  # less than the rows differ by
        (((1.0, 1.5), (1.0, 1.5)), False),
    ],
)
def test_the_rule_for_positions(losses, lost):
    base = run((1.0, 2.0), (1.0, 2.0))
    assert loses_context(run(*losses), base, length=4).above(LOSS) is lost
    assert f"{LOSS:g} nats" in long_context.__doc__


def test_the_verdicts_in_words():
    base, near = run((1.0, 2.0), (1.0, 2.0)), run((1.4, 2.0), (1.5, 2.0), right=0.5)
    far = run((1.0, 2.4), (1.0, 2.5))
    lines = conclusions({"a model": {BASE: base, "near": near, "far": far}}, length=4)
    assert lines == [
        "- a model, unpatched: 1.000 nats within 4 positions, 2.000 beyond.",
        "- a model: long context is lost by far (+0.450 ± 0.050); the loss rises less beyond 4 than within for near "
        "(-0.450 ± 0.050).",
        "- a model: copying is lost by near (at 8).",
    ]


def test_the_rules_for_copying():
    base, worse = run(right=0.9), run(right=0.8)
    assert copies(base)
    assert not copies(run(right=COPIES - 0.1))
    table = copying_table({BASE: base, "worse": worse, "same": run(right=0.9 - SHARE / 2)})
    assert [line.split(" | ")[-1] for line in table[3:-1]] == ["**lost** at 8 |", "kept |"]
    assert f"{SHARE:g} below" in long_context.__doc__


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_ends_with_the_copy_of_its_start(kind):
    ids = torch.arange(400) % 50
    rows = Draw(ids, seed=1).copies(kind, distance=20, span=8, rows=3)
    assert rows.shape == (3, 28)
    assert torch.equal(rows[:, :8], rows[:, 20:])
    assert torch.equal(rows, Draw(ids, seed=1).copies(kind, distance=20, span=8, rows=3))
    steps = rows[:, 1:8] - rows[:, :7]
    assert bool(((steps == 1) | (steps == -49)).all()) is (kind == "natural")


def test_a_lesson_holds_its_span_twice():
    draw = Draw(torch.arange(4000), seed=0)  # every token once: only a repeated span has any twice
    row = draw.repeated(100)
    values, counts = row.unique(return_counts=True)
    assert 16 <= int((counts > 1).sum()) <= 25
    assert len(values) < 100


def test_all_arms_are_measured_and_logged(text, tmp_path, monkeypatch):
    few = ("unpatched", "found knee", "knee 0, longest rows", "unpatched, length scale")
    monkeypatch.setattr(long_context, "ARMS", {arm: long_context.ARMS[arm] for arm in few})
    trained = dict.fromkeys(long_context_training.TRAINED, ("unpatched",))
    monkeypatch.setattr(long_context_training, "TRAINED", trained)
    tiny_model("llama", vocab_size=257).save_pretrained(tmp_path / "tiny")
    byte_tokenizer().save_pretrained(tmp_path / "tiny")
    command = ["--checkpoints", str(tmp_path / "tiny"), "--text", text, "--size", "quick"]
    command += ["--seeds", "1", "--taught", str(tmp_path / "taught"), "--out", str(tmp_path / "out")]
    page = long_context.main(command)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["settings"]["arm"] for row in rows[: 2 * len(few)]] == [*few, *few]
    assert len(rows) == 2 * len(few) + 4
    assert (tmp_path / "out.png").exists()
    assert page.count("| knee 0, longest rows | 0 |") == 2
    assert "## tiny, taught to copy" in page
    assert page.count("- A length scale on unpatched, beyond 32: ") == 2
    for stage in long_context_training.STAGES["quick"]:
        assert f"Trained {stage}, 1 seeds:" in page
    assert page.count("| unpatched, length scale | ") == 4  # two models by position, two trainings
    assert long_context.main(command) == page  # from the log
