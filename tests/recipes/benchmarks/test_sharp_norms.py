"""What sharp norms keep, at the smallest size, and the promise."""

from __future__ import annotations

import json

import pytest
import sharp_norms

from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.tiny import tiny_model


def test_both_defaults_are_compared(text, tmp_path):
    model = tiny_model("llama", vocab_size=257, max_position_embeddings=1024, initializer_range=0.2)
    save_with_tokenizer(model, tmp_path / "tiny")
    command = ["--models", f"{tmp_path / 'tiny'}={text}", "--size", "quick", "--out", str(tmp_path / "found")]
    page = sharp_norms.main(command)
    assert (tmp_path / "found.md").read_text() == page
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    defaults = {row["settings"]["scheme"]: row["result"] for row in rows}
    assert defaults["qk_norm"].keys() == defaults["qk_norm_cap"].keys() | {"removed"}
    assert all(row["result"]["bound"] > 0 and row["result"]["texts"].keys() == {"held-out", "Python"} for row in rows)
    assert sharp_norms.main(command) == page  # from the log


def row(kl: float, **others: float) -> dict:
    texts = {name: {"rise": kl, "kl": kl, "same": 1.0} for name in ("held-out", "Python")}
    return {"texts": texts, "bound": 1.0, "knee": 3.0, "long": 0.0, **others}


@pytest.mark.parametrize(
    ("found", "broken"),
    [
        (row(0.003, removed=0.002), []),
        (row(0.0041), ["rise 0.0041", "kl 0.0041"]),
        (row(0.0, long=0.011, removed=0.003), ["long 0.0110", "removed 0.0030"]),
    ],
)
def test_the_promise(found, broken):
    assert sharp_norms.broken(found) == broken
