"""The comparison of methods for gains, at its smallest size, and its rules."""

from __future__ import annotations

import json

import gain_methods
import pytest
from gain_methods import ARMS
from tiny import tiny_model

from hf_qknorm.demo.training import byte_tokenizer


def test_all_arms_are_compared(text, tmp_path):
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=1024, initializer_range=0.2)
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "tiny")
    command = ["--models", f"{tmp_path / 'tiny'}={text}", "--size", "quick", "--out", str(tmp_path / "found")]
    page = gain_methods.main(command)
    assert (tmp_path / "found.md").read_text() == page
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    results = {row["settings"]["arm"]: row["result"] for row in rows}
    assert list(results) == list(ARMS)
    assert all(row["kl"] >= 0 for row in results.values())
    assert results["plain, fit_qk"]["kl"] > 0  # from the model before its projections changed
    assert results["default"] == results["default, per head"]
    assert gain_methods.main(command) == page  # from the log


def rows(**kls: float) -> dict[str, dict[str, float]]:
    named = {arm: kls.get(arm.replace(", ", "_").replace(" ", "_"), 0.01) for arm in ARMS}
    return {arm: {"kl": kl, "rise": kl, "knee": 0.0, "same": 1.0, "bound": 1.0} for arm, kl in named.items()}


@pytest.mark.parametrize(
    ("results", "fit", "fit_qk"),
    [
        ({"default_fit": 0.0091, "knee_32": 0.0099}, True, True),
        ({"default_fit": 0.0089, "knee_32": 0.0099}, False, True),
        ({"plain_fit": 0.02, "plain_fit_qk": 0.02}, True, True),
        ({"plain_fit": 0.01, "plain_fit_qk": 0.02}, False, True),
        ({"plain_fit": 0.02, "plain_fit_qk": 0.005}, True, False),
        ({"knee_16": 0.001, "plain_fit_qk": 0.008}, True, False),
    ],
)
def test_trained_gains_follow_the_rule(results, fit, fit_qk):
    found = gain_methods.verdicts({"a": rows(knee_8=0.001), "b": rows(**results)})
    assert [each.endswith("goes.") for each in found[:2]] == [fit, fit_qk]


@pytest.mark.parametrize("better", [0, 1, 2])
def test_gains_per_head_follow_the_rule(better):
    results = {str(i): rows(plain_per_head=0.0089 if i < better else 0.0091) for i in range(3)}
    sharp, plain = gain_methods.verdicts(results)[2:]
    assert sharp.endswith("stop being recommended.")
    assert plain.endswith("stay recommended." if better == 2 else "stop being recommended.")


def test_an_arm_that_was_not_run_is_named():
    results = {"a": rows(knee_8=0.001)}
    del results["a"]["default, fit"]
    assert "| default, fit | not run |" in gain_methods.page(results, "")
