"""`inspect_model`: the measurements, the trials of schemes and knees, and the model left as it was."""

from __future__ import annotations

import json
import math

import pytest
import torch

from hf_qknorm import SCHEMES, Scheme, calibrate, inspect_model, patch_model, unpatch_model
from hf_qknorm.calibration.knees import LIMIT, SHARPNESS, with_margin
from hf_qknorm.families import FAMILIES
from hf_qknorm.inspection.inspect import SWEPT
from hf_qknorm.measure.bounds import logit_bound
from hf_qknorm.measure.predictions import evaluate, predictions
from hf_qknorm.model.attention import patched_layers
from qknorm_tests.tables import fingerprint, randomise, sharp_model
from qknorm_tests.tables import random_tokens as tokens
from qknorm_tests.tiny import tiny_model

CAP = Scheme(softcap=50.0)
FAMILIES_TRIED = ("gemma2", "gpt2", "llama", "mixtral", "qwen3")


@pytest.mark.parametrize("family", FAMILIES_TRIED)
def test_an_unpatched_model_is_measured_and_left_as_it_was(family):
    model = sharp_model(family).train()
    before, weights = fingerprint(model), {name: x.clone() for name, x in model.state_dict().items()}
    backend, batch = model.config._attn_implementation, tokens(2, 20)
    found = inspect_model(model, [batch, tokens(1, 12)])
    assert fingerprint(model) == before
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    assert model.training
    assert model.config._attn_implementation == backend
    assert (found.tokens, found.length, found.scheme, found.patched) == (52, 20, None, None)
    assert (found.model, found.model_type) == (model.name_or_path or type(model).__name__, family)
    patch_model(model.eval(), "none", attn_implementation="hf_qknorm")
    batches = [{"input_ids": x} for x in (batch, tokens(1, 12))]
    assert found.base == predictions(model, batches)[0]
    for name, layer in evaluate(model, batches, 50.0, compared=False).after.items():
        for field in ("max_logit", "entropy", "over_half", "over_cap", "rms_q", "rms_k"):
            assert getattr(found.layers[name], field) == pytest.approx(getattr(layer, field), rel=1e-5, abs=1e-6)
    assert {risk.layer for risk in found.risks} == set(patched_layers(model))


@pytest.mark.parametrize("family", FAMILIES_TRIED)
def test_schemes_that_may_suit_the_model_are_tried(family):
    model = sharp_model(family)
    batch = tokens(2, 20)
    found = inspect_model(model, [batch])
    has = FAMILIES[family]
    expected = ([] if has.own_cap else [CAP]) + ([] if has.own_norms else [SCHEMES["q_norm"], SCHEMES["qk_norm"]])
    assert list(found.trials) == expected
    for scheme, prediction in found.trials.items():
        patch_model(model, scheme, attn_implementation="hf_qknorm")
        base, own = predictions(model, [{"input_ids": batch[:1]}])  # one sequence of eight is judged
        assert prediction.loss - found.base.loss == pytest.approx(own.loss - base.loss, abs=1e-6)
        assert (prediction.kl, prediction.agreement) == (own.kl, own.agreement)
        unpatch_model(model)
    if not has.own_norms:
        assert found.trials[SCHEMES["qk_norm"]].kl > 0.01
    if has.own_cap:
        assert found.cap == 50
        assert "its cap of 50 bounds them" in "".join(found.advice.reasons)


@pytest.mark.parametrize("family", FAMILIES_TRIED)
def test_knees_are_tried_where_queries_and_keys_can_be_normed(family):
    model = sharp_model(family)
    before = fingerprint(model)
    batches = [{"input_ids": tokens(2, 20, seed)} for seed in range(4)]
    found = inspect_model(model, [batch["input_ids"] for batch in batches]).knees
    assert fingerprint(model) == before
    if FAMILIES[family].own_norms:
        assert found is None
        return
    tried = [trial.knee for trial in found.trials]
    assert tried == list(SWEPT[: len(tried)])
    assert len(tried) == len(SWEPT) or tried[-1] >= found.chosen.knee > found.least
    assert [trial.bound for trial in found.trials] == sorted(trial.bound for trial in found.trials)
    assert found.scheme == (SCHEMES["qk_norm"] if FAMILIES[family].own_cap else SCHEMES["qk_norm_cap"])
    judged = [{"input_ids": batches[0]["input_ids"][:1]}]  # one of eight
    assert found.jump == pytest.approx(jump(model, judged, found.scheme), abs=1e-6)
    assert found.limit == LIMIT
    least = next((trial.knee for trial in found.trials if trial.cost <= found.limit), None)
    assert (found.chosen and found.chosen.knee) == (least and with_margin(least))
    patch_model(model, found.scheme, attn_implementation="hf_qknorm")
    report = calibrate(model, judged, "moments", knee=tried[-1], sharpness=SHARPNESS)
    trial = found.trials[-1]
    assert trial.bound == pytest.approx(report.bound, rel=1e-3)
    loss = predictions(model, judged)
    assert trial.rise == pytest.approx(loss[1].loss - loss[0].loss, abs=1e-3)


def jump(model: torch.nn.Module, batches: list, scheme: Scheme) -> float:
    """The rise in loss with a scheme with fresh gains."""
    patch_model(model, scheme, attn_implementation="hf_qknorm")
    base, ones = predictions(model, batches)
    unpatch_model(model)
    return ones.loss - base.loss


@pytest.mark.parametrize("scheme", ["qk_norm_cap", "qkv_norm", "q_norm", "none", {"softcap": 3.0}])
def test_a_patched_model_is_measured_as_it_is(scheme):
    model = patch_model(sharp_model("llama"), scheme)
    before = fingerprint(model)
    found = inspect_model(model, [tokens(2, 20)])
    assert fingerprint(model) == before
    assert found.scheme == model.config.scheme
    base, now = predictions(model, [{"input_ids": tokens(2, 20)}])
    assert (found.base, found.patched, found.trials) == (base, now, {})
    assert found.cap == (model.config.attn_logit_softcapping or 50)
    assert str(found.scheme) in str(found) == found.table()
    if scheme == "qk_norm_cap":
        assert found.keeps
        assert "Advice: leave it as it is" in found.table()


def test_the_entropy_of_even_attention_is_a_mean_of_logarithms():
    batch = {"input_ids": tokens(2, 20), "attention_mask": torch.ones(2, 20, dtype=torch.long)}
    batch["attention_mask"][0, :15] = 0
    llama = inspect_model(sharp_model("llama"), [batch])
    mistral = inspect_model(sharp_model("mistral"), [batch])  # with a window of 8
    for found, window in ((llama, 20), (mistral, 8)):
        terms = [math.log(min(t, window)) for n in (5, 20) for t in range(1, n + 1)]
        assert [layer.even for layer in found.layers.values()] == [pytest.approx(sum(terms) / 25)] * 2
    model = sharp_model("mistral")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.zero_()  # then attention is even
    found = inspect_model(model, [batch])
    for layer in found.layers.values():
        assert layer.entropy == pytest.approx([layer.even] * 4, rel=1e-5)


def test_the_json_file_holds_all_fields(tmp_path):
    found = inspect_model(sharp_model("llama"), [tokens(2, 20)])
    found.save(tmp_path / "inspect.json")
    data = json.loads((tmp_path / "inspect.json").read_text())
    assert data == json.loads(json.dumps(found.to_dict()))
    assert list(data["layers"]) == list(found.layers)
    assert data["layers"]["model.layers.0.self_attn"]["max_logit"] == list(
        found.layers["model.layers.0.self_attn"].max_logit
    )
    assert data["advice"]["reasons"] == list(found.advice.reasons)
    assert [risk["layer"] for risk in data["risks"]] == [risk.layer for risk in found.risks]
    assert [trial["prediction"]["kl"] for trial in data["trials"]] == [trial.kl for trial in found.trials.values()]
    assert data["knees"]["limit"] == found.knees.limit
    assert [trial["knee"] for trial in data["knees"]["trials"]] == [trial.knee for trial in found.knees.trials]
    assert data.get("chosen_knee") == (found.knees.chosen and found.knees.chosen.knee)


def test_a_patched_model_is_inspected_with_its_bounds():
    model = randomise(patch_model(sharp_model("llama"), Scheme(q="rms", k="rms")), knee=4)
    calibrate(model, [tokens(2, 20, seed) for seed in range(3)], "moments", knee=4)
    found = inspect_model(model, [tokens(2, 20)])
    layers = patched_layers(model)
    assert {name: layer.bound for name, layer in found.layers.items()} == {n: logit_bound(x) for n, x in layers.items()}
    assert found.bound == max(layer.bound for layer in found.layers.values())
    assert all(max(layer.max_logit) <= layer.bound for layer in found.layers.values())
    header = next(line for line in found.table().splitlines() if line.startswith("layer "))
    assert header.split()[-4:] == ["bound", "beyond", "q,", "k"]
    assert inspect_model(sharp_model("llama"), [tokens(2, 20)]).bound is None


def test_the_table_warns_of_text_that_is_shorter_than_the_context():
    model = sharp_model("llama", max_position_embeddings=64)
    found = inspect_model(model, [tokens(2, 20)])
    assert (found.length, found.context) == (20, 64)
    text = " ".join(found.table().split())
    assert "Measured in sequences of up to 20 tokens; the model's context has 64. Later positions were not" in text
    assert "later positions" not in inspect_model(model, [tokens(1, 64)]).table().lower()
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
