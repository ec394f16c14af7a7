"""The files that a conversion writes beside the weights: card, report and stand-alone code."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hf_qknorm import Calibration, cli, convert_checkpoint, patch_model
from hf_qknorm.convert.remeasure import remeasure, remeasure_checkpoint
from hf_qknorm.files.names import CARD, CODE_FILE, KEPT_CARD, PLOT, REPORT
from hf_qknorm.ops.norms import NORMS, NormKind
from hf_qknorm.small_model import byte_tokenizer
from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.tiny import tiny_model

TEXT = "the quick brown fox jumps over the lazy dog. " * 40
OURS = {"README.md": "---\nlicense: mit\nbase_model: owner/ancestor\n---\n# Theirs\n", KEPT_CARD: "older"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_with_tokenizer(tiny_model("llama", vocab_size=300, initializer_range=0.2), tmp_path / "source")


def test_a_conversion_writes_card_code_and_report(source, tmp_path):
    for name, text in OURS.items():
        (source / name).write_text(text)
    out = tmp_path / "out"
    report = convert_checkpoint(source, out, "qk_norm", data=[TEXT], knee=0)
    assert {CODE_FILE, REPORT, CARD, KEPT_CARD, PLOT} <= {path.name for path in out.iterdir()}
    card = (out / CARD).read_text()
    assert "license: mit" in card
    assert "base_model: owner/ancestor" in card
    assert f"**{report.loss:.3f}**" in card
    assert "`from_pretrained(..., trust_remote_code=True)` runs the repository's `modeling_qknorm.py`" in card
    assert (out / KEPT_CARD).read_text() == OURS[CARD]
    for name in (CARD, REPORT, "config.json"):
        assert str(tmp_path) not in (out / name).read_text(), name


def test_a_converted_checkpoint_keeps_its_report_when_it_is_saved(source, tmp_path):
    out = tmp_path / "out"
    report = convert_checkpoint(source, out, "qk_norm", data=[TEXT], knee=0)
    AutoModelForCausalLM.from_pretrained(out).save_pretrained(tmp_path / "again")
    assert Calibration.load(tmp_path / "again" / REPORT) == report == Calibration.load(out / REPORT)


def test_files_of_another_conversion_are_not_taken_over(source, tmp_path):
    convert_checkpoint(source, tmp_path / "first", "soft_cap", data=[TEXT])
    for name in (CARD, CODE_FILE, REPORT, PLOT):
        (source / name).write_bytes((tmp_path / "first" / name).read_bytes())
    convert_checkpoint(source, tmp_path / "out", "qk_norm", standalone=False)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert not {CODE_FILE, REPORT, PLOT} & written
    assert (tmp_path / "out" / CARD).read_text() != (source / CARD).read_text()


def test_code_that_can_not_be_made_is_refused_with_the_way_out(source, tmp_path, monkeypatch):
    monkeypatch.setitem(NORMS, "own", NormKind("a norm of one's own"))
    scheme = {"q": "own", "k": "own"}
    for dry_run in (True, False):
        with pytest.raises(ValueError, match="norm 'own' is not hf_qknorm's own.*standalone=False.*--no-standalone"):
            convert_checkpoint(source, tmp_path / "out", scheme, dry_run=dry_run)
    assert not (tmp_path / "out").exists()
    convert_checkpoint(source, tmp_path / "out", scheme, standalone=False)
    monkeypatch.setattr("hf_qknorm.standalone.generate.standalone_code", lambda model_type: {}[model_type])
    with pytest.raises(ValueError, match="no stand-alone code can be made for llama .*KeyError: 'llama'"):
        convert_checkpoint(source, tmp_path / "other", "qk_norm")


@pytest.mark.parametrize(("options", "without"), [([], True), (["--no-standalone"], False)])
def test_the_last_line_says_how_to_load(source, tmp_path, options, without, capsys):
    assert cli.main(["convert", str(source), str(tmp_path / "out"), "--scheme", "qk_norm", *options]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("load it with `import hf_qknorm`")
    assert ("trust_remote_code=True" in line) == without


def test_the_command_card_measures_again(source, tmp_path, capsys):
    out, corpus = tmp_path / "out", tmp_path / "corpus.txt"
    corpus.write_text(TEXT)
    first = convert_checkpoint(source, out, "qk_norm_cap", data=[TEXT], knee=0)
    model = AutoModelForCausalLM.from_pretrained(out)
    model.lm_head.weight.data.mul_(2.0)
    model.save_pretrained(out)
    assert Calibration.load(out / REPORT).loss == first.loss
    assert cli.main(["card", str(out), "--data", str(corpus), "--max-tokens", "512"]) == 0
    printed = capsys.readouterr().out
    report = Calibration.load(out / REPORT)
    assert (report.method, report.tokens) == ("measured", 512)
    assert (report.base, report.ones, report.kept) == (None, None, None)
    assert report.loss != pytest.approx(first.loss, abs=0.01)
    assert report.bound == pytest.approx(first.bound)
    assert all(layer.before is None for layer in report.layers.values())
    assert report.table() in printed
    card = (out / CARD).read_text()
    for text in ("## Measurement", f"its loss is **{report.loss:.3f}** nats per token", "![Largest attention logits"):
        assert text in card
    assert str(tmp_path) not in card + (out / REPORT).read_text()
    again = AutoModelForCausalLM.from_pretrained(out)
    again.save_pretrained(tmp_path / "again")
    assert Calibration.load(tmp_path / "again" / REPORT) == report


def test_a_model_in_memory_is_measured_as_it_is(source, tmp_path):
    convert_checkpoint(source, tmp_path / "out", {"q": "rms", "k": "rms", "v": "rms", "pre_norm": False})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").train()
    report = remeasure(model, [TEXT], tokenizer=byte_tokenizer(), max_tokens=256)
    assert model.training
    ids = byte_tokenizer()(TEXT, return_tensors="pt")["input_ids"][:, :256]
    assert report.tokens == 256
    expected = model.eval()(input_ids=ids[:, :128], labels=ids[:, :128]).loss.item()
    second = model(input_ids=ids[:, 128:], labels=ids[:, 128:]).loss.item()
    assert report.loss == pytest.approx((expected + second) / 2, rel=1e-5)
    model.save_pretrained(tmp_path / "saved")
    assert Calibration.load(tmp_path / "saved" / REPORT) == report


def test_measurements_are_refused_before_weights_are_read(source, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_qknorm.measure.measured_checkpoint.load_causal", None)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(TEXT)
    with pytest.raises(ValueError, match="holds a plain llama: convert it first"):
        remeasure_checkpoint(source, str(corpus))
    with pytest.raises(ValueError, match="LlamaForCausalLM is not patched"):
        remeasure(tiny_model("llama"), [TEXT])
    patch_model(tiny_model("llama", vocab_size=300), "qk_norm").save_pretrained(tmp_path / "bare")
    with pytest.raises(FileNotFoundError, match="bare has no tokenizer"):
        remeasure_checkpoint(tmp_path / "bare", str(corpus))
