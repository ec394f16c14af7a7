"""The sweep of learning rates of a ViT, at its smallest size."""

from __future__ import annotations

import json
import math

import pytest
import vision

pytest.importorskip("sklearn", reason="the images come with scikit-learn")


def test_all_arms_are_swept_and_logged(tmp_path):
    command = ["--size", "quick", "--seeds", "1", "--rates", "0.001", "0.03", "--out", str(tmp_path / "found")]
    found = vision.main(command)
    page = (tmp_path / "found.md").read_text()
    assert all(f"\n| {arm} |" in page for arm in (*vision.CHOSEN, *vision.SIMPLE))
    assert "the linear classifier: " in page
    assert "the even guess: " in page
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * len(vision.CHOSEN)
    ends = {row["settings"]["arm"]: row["result"] for row in rows if row["settings"]["rate"] == 0.03}
    assert ends["baseline"]["held_out"] != ends["qk_norm"]["held_out"]
    assert vision.main(command) == found  # from the log


def test_no_image_is_trained_on_and_held_out():
    found, size = vision.images(), vision.SIZES["quick"]
    assert len(found.judging()["labels"]) == vision.HELD_OUT
    assert 0 < found.linear_loss() < 0.3 < math.log(vision.DIGITS)
    held_out = {row.numpy().tobytes() for row in found.judging()["pixel_values"]}
    seen = {row.numpy().tobytes() for batch in found.batches(size, seed=0) for row in batch["pixel_values"]}
    assert len(held_out) == vision.HELD_OUT
    assert not held_out & seen
    assert found.pixels.min() == -1
    assert found.pixels.max() == 1
