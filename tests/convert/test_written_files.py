"""The files that a conversion writes beside the weights: card, report and stand-alone code."""

import pytest
from transformers import AutoModelForCausalLM

from hf_qknorm import Calibration, convert_checkpoint
from hf_qknorm.files.names import CARD, CODE_FILE, KEPT_CARD, PLOT, REPORT
from hf_qknorm.ops.norms import NORMS, NormKind

TEXT = "the quick brown fox jumps over the lazy dog. " * 40
OURS = {"README.md": "---\nlicense: mit\nbase_model: owner/ancestor\n---\n# Theirs\n", KEPT_CARD: "older"}


def test_a_conversion_writes_card_code_and_report(llama, tmp_path):
    for name, text in OURS.items():
        (llama / name).write_text(text)
    out = tmp_path / "out"
    report = convert_checkpoint(llama, out, "qk_norm", data=[TEXT], knee=0)
    assert {CODE_FILE, REPORT, CARD, KEPT_CARD, PLOT} <= {path.name for path in out.iterdir()}
    card = (out / CARD).read_text()
    assert "license: mit" in card
    assert "base_model: owner/ancestor" in card
    assert f"**{report.loss:.3f}**" in card
    assert "`from_pretrained(..., trust_remote_code=True)` runs the repository's `modeling_qknorm.py`" in card
    assert (out / KEPT_CARD).read_text() == OURS[CARD]
    for name in (CARD, REPORT, "config.json"):
        assert str(tmp_path) not in (out / name).read_text(), name
    convert_checkpoint(llama, out, "qk_norm", data=[TEXT], knee=0, overwrite=True)  # replaces all of these files
    AutoModelForCausalLM.from_pretrained(out).save_pretrained(tmp_path / "again")
    assert Calibration.load(tmp_path / "again" / REPORT) == report == Calibration.load(out / REPORT)


def test_files_of_another_conversion_are_not_taken_over(llama, tmp_path):
    convert_checkpoint(llama, tmp_path / "first", "soft_cap", data=[TEXT])
    for name in (CARD, CODE_FILE, REPORT, PLOT):
        (llama / name).write_bytes((tmp_path / "first" / name).read_bytes())
    convert_checkpoint(llama, tmp_path / "out", "qk_norm", standalone=False)
    assert not {CODE_FILE, REPORT, PLOT} & {path.name for path in (tmp_path / "out").iterdir()}
    assert (tmp_path / "out" / CARD).read_text() != (llama / CARD).read_text()


def test_code_that_can_not_be_made_is_refused_with_the_way_out(llama, tmp_path, monkeypatch):
    monkeypatch.setitem(NORMS, "own", NormKind("a norm of one's own"))
    scheme = {"q": "own", "k": "own"}
    for dry_run in (True, False):
        with pytest.raises(ValueError, match="norm 'own' is not hf_qknorm's own.*standalone=False.*--no-standalone"):
            convert_checkpoint(llama, tmp_path / "out", scheme, dry_run=dry_run)
    assert not (tmp_path / "out").exists()
    convert_checkpoint(llama, tmp_path / "out", scheme, standalone=False)
    monkeypatch.setattr("hf_qknorm.standalone.generate.standalone_code", lambda model_type: {}[model_type])
    with pytest.raises(ValueError, match="no stand-alone code can be made for llama .*KeyError: 'llama'"):
        convert_checkpoint(llama, tmp_path / "other", "qk_norm")
