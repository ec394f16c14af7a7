"""Inspections of models, which are left as they were, and of checkpoints: measurements, trials of schemes and knees."""

import json
import math

import pytest
import torch

from hf_qknorm import SCHEMES, Scheme, calibrate, inspect_model, logit_statistics, patch_model, unpatch_model
from hf_qknorm.calibration.knees import KNEES, LIMIT, SHARPNESS
from hf_qknorm.families import FAMILIES
from hf_qknorm.inspection.inspect import SWEPT, inspect_checkpoint
from hf_qknorm.measure.bounds import norm_limits
from hf_qknorm.measure.predictions import predictions
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.reports.inspection import Inspection
from qknorm_tests.folders import configure, save_with_tokenizer
from qknorm_tests.tables import fingerprint, randomise, sharp_model
from qknorm_tests.tables import random_tokens as tokens
from qknorm_tests.tiny import tiny_model

FAMILIES_TRIED = ("gemma2", "gpt2", "llama", "qwen3")


@pytest.mark.parametrize("family", FAMILIES_TRIED)
def test_an_unpatched_model_is_measured_and_left_as_it_was(family):
    model = sharp_model(family).train()
    before, weights = fingerprint(model), {name: x.clone() for name, x in model.state_dict().items()}
    config, backend, batch = model.config, model.config._attn_implementation, tokens(2, 20)
    found = inspect_model(model, [batch, tokens(1, 12)])
    assert fingerprint(model) == before
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    assert model.training
    assert model.config is model.base_model.config is config
    assert model.config._attn_implementation == backend
    assert (found.tokens, found.length, found.scheme, found.patched) == (52, 20, None, None)
    assert (found.model, found.model_type) == (model.name_or_path or type(model).__name__, family)
    patch_model(model.eval(), "none", attn_implementation="hf_qknorm")
    batches = [{"input_ids": x} for x in (batch, tokens(1, 12))]
    assert found.base == predictions(model, batches)[0]
    with torch.no_grad(), logit_statistics(model, cap=50.0) as watched:
        for each in batches:
            model(**each)
    for name, seen in watched.items():
        for field in ("max_logit", "entropy", "over_half", "over_cap", "even"):
            expected = getattr(seen, field).tolist()
            assert getattr(found.layers[name], field) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert list(found.layers) == list(patched_layers(model))


@pytest.mark.parametrize("call", [1, 2])
def test_an_interrupted_inspection_leaves_the_model_as_it_was(call, monkeypatch):
    model, calls = sharp_model("llama").train(), []
    before, config = fingerprint(model), model.config

    def unpatch(model):
        calls.append(model)
        if len(calls) == call:
            raise KeyboardInterrupt
        return unpatch_model(model)

    monkeypatch.setattr("hf_qknorm.inspection.inspect.unpatch_model", unpatch)
    with pytest.raises(KeyboardInterrupt):
        inspect_model(model, [tokens(2, 20)])
    assert (fingerprint(model), model.training, model.config is config) == (before, True, True)


@pytest.mark.parametrize("family", FAMILIES_TRIED)
def test_schemes_that_may_suit_the_model_are_tried(family):
    model, batch, has = sharp_model(family), tokens(2, 20), FAMILIES[family]
    found = inspect_model(model, [batch])
    assert list(found.trials) == ["soft_cap"] * (not has.own_cap) + ["q_norm", "qk_norm"] * (not has.own_norms)
    for name, prediction in found.trials.items():
        patch_model(model, name, attn_implementation="hf_qknorm")
        base, own = predictions(model, [{"input_ids": batch[:1]}])  # one sequence of eight is judged
        assert prediction.loss - found.base.loss == pytest.approx(own.loss - base.loss, abs=1e-6)
        assert (prediction.kl, prediction.agreement) == (own.kl, own.agreement)
        unpatch_model(model)
    if has.own_cap:
        assert found.cap == 50
        assert "its cap of 50 bounds them" in "".join(found.advice.reasons)


@pytest.mark.parametrize("family", FAMILIES_TRIED)
def test_knees_are_tried_where_queries_and_keys_can_be_normed_up_to_the_one_that_is_chosen(family):
    model, batches = sharp_model(family), [tokens(2, 20, seed) for seed in range(4)]
    found = inspect_model(model, batches)
    if FAMILIES[family].own_norms:
        assert (found.knees, found.knee) == ({}, None)
        return
    cheap = [max(tried.loss - found.base.loss, tried.kl) <= LIMIT for tried in found.knees.values()]
    assert list(found.knees) == list(SWEPT[: len(cheap)])
    assert found.knee == (list(found.knees)[-1] if any(cheap) else None)
    first = cheap.index(True) if any(cheap) else len(SWEPT)
    assert len(cheap) == min(first + 2, len(SWEPT))  # the next larger one is a margin
    bounds = [tried.bound for tried in found.knees.values()]
    assert bounds == sorted(bounds)
    assert found.knee_scheme == (SCHEMES["qk_norm"] if FAMILIES[family].own_cap else SCHEMES["qk_norm_cap"])
    judged = [{"input_ids": batches[0][:1]}]  # one of eight
    patch_model(model, found.knee_scheme, attn_implementation="hf_qknorm")
    knee, tried = list(found.knees.items())[-1]
    report = calibrate(model, judged, knee=knee, sharpness=SHARPNESS)
    assert tried.bound == pytest.approx(report.bound, rel=1e-3)
    assert tried.loss - found.base.loss == pytest.approx(report.loss - report.base.loss, abs=1e-3)
    assert f"knee {knee:.3g}{', chosen' * (knee == found.knee)} " in str(found)


@pytest.mark.parametrize("scheme", ["qk_norm_cap", "qkv_norm", "q_norm", "none", {"softcap": 3.0}])
def test_a_patched_model_is_measured_as_it_is(scheme):
    model = patch_model(sharp_model("llama"), scheme)
    before = fingerprint(model)
    found = inspect_model(model, [tokens(2, 20)])
    assert fingerprint(model) == before
    assert found.scheme == Scheme.of(scheme).resolve()
    base, now = predictions(model, [{"input_ids": tokens(2, 20)}])
    assert (found.base, found.patched, found.trials) == (base, now, {})
    assert found.cap == (found.scheme.softcap or 50)
    assert str(found.scheme) in str(found)
    if scheme == "qk_norm_cap":
        assert "Advice: leave it as it is" in str(found)


def test_the_json_file_holds_all_fields(tmp_path):
    found = inspect_model(sharp_model("llama"), [tokens(2, 20)])
    found.save(tmp_path / "inspect.json")
    data = json.loads((tmp_path / "inspect.json").read_text())
    assert data == json.loads(json.dumps(found.to_dict()))
    for name, layer in found.layers.items():
        assert data["layers"][name]["max_logit"] == list(layer.max_logit)
    assert data["advice"]["reasons"] == list(found.advice.reasons)
    for shown, tried in ((data["trials"], found.trials), (data["knees"], found.knees)):
        assert [(p["kl"], p.get("bound")) for p in shown.values()] == [(p.kl, p.bound) for p in tried.values()]
    assert [float(knee) for knee in data["knees"]] == list(found.knees)
    assert data.get("knee") == found.knee


def test_a_patched_model_is_inspected_with_its_bounds():
    model = randomise(patch_model(sharp_model("llama"), Scheme(q="rms", k="rms")), knee=4)
    calibrate(model, [tokens(2, 20, seed) for seed in range(3)], knee=4)
    found = inspect_model(model, [tokens(2, 20)])
    bounds = {name: limits["bound"] for name, limits in norm_limits(model).items()}
    assert {name: layer.bound for name, layer in found.layers.items()} == bounds
    assert found.bound == max(layer.bound for layer in found.layers.values())
    assert all(max(layer.max_logit) <= layer.bound for layer in found.layers.values())
    header = next(line for line in str(found).splitlines() if line.startswith("layer "))
    assert header.split()[-4:] == ["bound", "gain", "q,", "k"]
    assert inspect_model(sharp_model("llama"), [tokens(2, 20)]).bound is None


def test_the_table_warns_of_text_that_is_shorter_than_the_context():
    model = sharp_model("llama", max_position_embeddings=64)
    found = inspect_model(model, [tokens(2, 20)])
    assert (found.length, found.context) == (20, 64)
    text = " ".join(str(found).split())
    assert "Measured in sequences of up to 20 tokens; the model's context has 64. Later positions were not" in text
    assert "later positions" not in str(inspect_model(model, [tokens(1, 64)])).lower()
    with pytest.raises(ValueError, match="length=1: expected 2 or more"):
        inspect_model(model, [tokens(2, 20)], length=1)
    with pytest.raises(ValueError, match="length=65: expected 2 to 64, the model's learned positions"):
        inspect_model(tiny_model("gpt2", max_position_embeddings=64), [tokens(2, 20)], length=65)


@pytest.mark.parametrize("cap", [0.0, -1.0, math.inf, math.nan])
def test_impossible_caps_are_refused(cap):
    with pytest.raises(ValueError, match="cap is .*, expected a finite number > 0"):
        inspect_model(tiny_model("llama"), [tokens(2, 20)], cap=cap)


def test_infinite_logits_are_refused_with_the_name_of_the_layer():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = math.inf
    with pytest.raises(ValueError, match=r"logits of model.layers.1.self_attn are not finite in torch.float32"):
        inspect_model(model, [tokens(2, 20)])
    assert type(model).__name__ == "LlamaForCausalLM"


@pytest.fixture
def checkpoint(tmp_path):
    """A small checkpoint with a tokenizer, and some text."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return save_with_tokenizer(sharp_model("llama", vocab_size=257), tmp_path / "checkpoint")


def test_a_checkpoint_is_inspected_on_a_text(checkpoint):
    text = checkpoint.parent / "text.txt"
    found = inspect_checkpoint(str(checkpoint), data=str(text), max_tokens=600)
    assert isinstance(found, Inspection)
    assert (found.tokens, found.length) == (512, 128)  # as far as its positions reach
    assert found.model == str(checkpoint)
    patch_model(sharp_model("llama", vocab_size=257), "qk_norm").save_pretrained(checkpoint)
    again = inspect_checkpoint(str(checkpoint), data=str(text), max_tokens=600)
    assert again.scheme == SCHEMES["qk_norm"].resolve()
    assert again.model_type == "qknorm_llama"


def test_missing_files_are_named_in_one_line(checkpoint):
    text = str(checkpoint.parent / "text.txt")
    with pytest.raises(OSError, match="anywhere is no folder here, and the download from the Hub failed") as error:
        inspect_checkpoint("no-such-model-anywhere", data=text)
    assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="config.json is missing: is this a checkpoint of transformers?"):
        inspect_checkpoint(str(checkpoint.parent), data=text)
    configure(checkpoint, model_type="bert")
    with pytest.raises(ValueError, match="bert has bidirectional attention"):
        inspect_checkpoint(str(checkpoint), data=text)
    configure(checkpoint, model_type="llama")
    for path in checkpoint.glob("tokenizer*"):
        path.unlink()
    with pytest.raises((OSError, ValueError), match=f"{checkpoint}: ") as error:
        inspect_checkpoint(str(checkpoint), data=text)
    assert "\n" not in str(error.value)
    assert "tokenizer" in str(error.value)


def test_the_advice_for_a_trained_model(shared):
    text = str(shared / "data" / "tinyshakespeare.txt")
    found = inspect_checkpoint(str(shared / "checkpoints" / "llama-shakespeare"), data=text, max_tokens=2048)
    assert found.advice.scheme == SCHEMES["qk_norm_cap"]
    assert found.ranked[0][0] == "model.layers.3.self_attn"
    assert found.largest > 50
    trials = found.trials
    assert trials["qk_norm"].kl > 10 * trials["q_norm"].kl > 100 * trials["soft_cap"].kl
    assert 0 < found.knee < KNEES[-1]
    assert f"a knee of {found.knee:.3g} costs" in " ".join(str(found).split())
