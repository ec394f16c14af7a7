"""The reports of calibrations: their numbers, names, gains and bounds."""

import pytest

from hf_qknorm import Calibration, Scheme, calibrate, patch_model
from hf_qknorm.calibration.calibrate import HELD_OUT
from hf_qknorm.measure.batches import divided
from hf_qknorm.measure.bounds import norm_limits
from hf_qknorm.measure.predictions import evaluate
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.install import as_unpatched
from hf_qknorm.small_model import byte_tokenizer
from qknorm_tests.tables import random_tokens as tokens
from qknorm_tests.tiny import tiny_model


def made(scheme: str | Scheme) -> Calibration:
    """The report of a small calibration."""
    model = patch_model(tiny_model("llama", initializer_range=0.2), scheme)
    return calibrate(model, [tokens(2, 20, seed) for seed in range(3)], knee=0)


def test_reports_name_hub_repositories_and_no_local_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("a line of text " * 100)
    model = patch_model(tiny_model("llama", vocab_size=300), "qk_norm")
    tokenizer = byte_tokenizer()

    def base() -> str | None:
        return calibrate(model, "corpus.txt", knee=0, tokenizer=tokenizer, max_tokens=256).base_model

    model.name_or_path = "owner/llama"  # not loaded from the Hub: it may be the name of a local folder
    assert base() is None
    model.config._commit_hash = "0" * 40
    assert base() == "owner/llama"
    model.name_or_path = str(tmp_path)
    assert base() is None


@pytest.mark.parametrize(("count", "judged"), [(8, 80), (1, 20)])
def test_reports_count_the_tokens_of_the_evaluation(count, judged):
    report = calibrate(patch_model(tiny_model("llama"), "qk_norm"), [tokens(1, 20, x) for x in range(count)])
    assert (report.tokens, report.judged) == (20 * count, judged)


@pytest.mark.parametrize(
    ("scheme", "knee"), [(Scheme(q="rms", k="rms", gain="per_head"), 0), (Scheme(q="rms", k="rms"), 1.0)]
)
def test_reports_have_statistics_before_and_after_gains_and_bounds(scheme, knee):
    batches = [{"input_ids": tokens(2, 20, seed)} for seed in range(3)]
    model = patch_model(tiny_model("llama", initializer_range=0.2), scheme)
    report = calibrate(model, batches, knee=knee)
    _, judged = divided(batches, *HELD_OUT)
    with as_unpatched(model):
        before = evaluate(model, judged, 50.0, compared=False).after
    after = evaluate(model, judged, 50.0, compared=False).after
    assert list(report.layers) == list(patched_layers(model))
    for name, layer in patched_layers(model).items():
        got = report.layers[name]
        assert got.after == after[name]
        assert got.before.max_logit == before[name].max_logit != got.after.max_logit
        assert got.after.bound == norm_limits(model)[name]["bound"] > max(got.after.max_logit)
        gains = tuple(float(x.weight.detach().abs().max()) for x in (layer.q_norm, layer.k_norm))
        assert (got.after.gain_q, got.after.gain_k) == gains
    assert (report.base.kl, report.base.agreement) == (0, 1)
    assert report.ones.kl > report.chosen.kl > 0
    assert report.scheme == model.config.scheme
    assert report.bound == max(layer.after.bound for layer in report.layers.values())
    assert f"|logit| ≤ {report.bound:.1f} for any input, up to rounding" in str(report)
    sides = {scheme: next(iter(made(scheme).layers.values())).after for scheme in ("qk_norm", "q_norm", "soft_cap")}
    assert [(x.gain_q is None, x.gain_k is None) for x in sides.values()] == [(False,) * 2, (False, True), (True,) * 2]


def test_without_a_language_modelling_head_there_are_no_predictions():
    report = calibrate(patch_model(tiny_model("llama").base_model, "qk_norm"), [tokens(2, 20)], knee=0)
    assert (report.base, report.ones, report.chosen, report.loss, report.kl) == (None,) * 5
    end = (
        f"hidden states change by {report.output_error:.2%}; |logit| ≤ {report.bound:.1f} for any input, up to rounding"
    )
    assert str(report) == f"calibrated: gains from 40 tokens; {end}"
    assert "perplexity" not in report.table()
    assert "layers.0.self_attn" in report.table()
    assert Calibration.from_dict(report.to_dict()) == report


def test_shares_are_relative_to_the_schemes_cap():
    report = made(Scheme(q="rms", k="rms", softcap=2.0))
    assert (report.cap, made("qk_norm").cap) == (2, 50)
    assert any(share > 0 for layer in report.layers.values() for share in layer.before.over_cap)
    assert "> 1 " in report.table()
