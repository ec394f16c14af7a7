"""A published report is of the published weights, or says that it is not; and no card has the numbers of others."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_qknorm import Calibration, Scheme, calibrate, patch_model, push_to_hub
from hf_qknorm.convert.card import write_card
from hf_qknorm.files.names import PLOT, REPORT
from qknorm_tests.push_cases import checkpoint, patched
from qknorm_tests.tiny import tiny_model

BATCHES = [torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(i)) for i in range(3)]


def calibrated():
    model = patched()
    return model, calibrate(model, BATCHES, method="moments")


@pytest.mark.parametrize("how", ["ours", "save_pretrained", "push_to_hub"])
def test_a_model_in_memory_is_pushed_with_its_report(hub, tmp_path, how):
    model, report = calibrated()
    checkpoint(tmp_path / "out")
    model.save_pretrained(tmp_path / "out")
    if how == "ours":
        push_to_hub(model, "me/tiny")
    elif how == "save_pretrained":
        model.save_pretrained(tmp_path / "out", push_to_hub=True, repo_id="me/tiny")
    else:
        model.push_to_hub("me/tiny")
    files = hub.commits("me/tiny")[-1].files
    assert Calibration.from_dict(json.loads(files[REPORT])) == report
    loaded = AutoModelForCausalLM.from_pretrained("me/tiny")
    loaded.save_pretrained(tmp_path / "again")
    assert Calibration.load(tmp_path / "again" / REPORT) == report


def test_after_training_the_card_says_that_its_numbers_are_those_of_the_conversion(tmp_path):
    model, report = calibrated()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(1e-4)
    model.save_pretrained(tmp_path)
    assert [path.name for path in write_card(tmp_path)] == ["README.md", PLOT]
    card = (tmp_path / "README.md").read_text()
    assert "All numbers were measured at conversion." in card
    assert f"{report.loss:.3f}" in card


def test_a_card_of_another_scheme_is_not_pushed(hub, tmp_path, caplog):
    """Also without a report, whose numbers would tell."""
    out = checkpoint(tmp_path / "out")
    write_card(out)
    card = (out / "README.md").read_text()
    (out / "README.md").write_text(f"{card}\nMy own words.\n")
    patch_model(tiny_model("llama", vocab_size=300), Scheme(softcap=30.0)).save_pretrained(out)
    push_to_hub(out, "me/tiny")
    assert "a new card is uploaded, without its edits" in caplog.text
    pushed = hub.commits("me/tiny")[-1].files["README.md"].decode()
    assert "softcap=30.0" in pushed
    assert "50" not in pushed.partition("## Changes")[2].partition("##")[0]
