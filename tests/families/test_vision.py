"""Bidirectional models of images and text, and CLIP's text model, are patched like causal ones."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from hf_qknorm import (
    FAMILIES,
    SCHEMES,
    calibrate,
    inspect_model,
    patch_model,
    unpatch_model,
)
from hf_qknorm.calibration.calibrate import HELD_OUT
from hf_qknorm.measure.regroup import divided
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.derived import derived_model
from hf_qknorm.model.install import as_unpatched
from qknorm_tests.tables import assert_backends_agree, assert_identical, assert_near, fingerprint, randomise
from qknorm_tests.tiny import tiny_config
from qknorm_tests.vision_cases import CASES, IMAGES, MORE, auto_of, batches, made, out_of, seen, step, type_of

TOLERANCE = 1e-5
BACKENDS = ("hf_qknorm", "hf_qknorm_eager", "hf_qknorm_tiled")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES | (MORE if metafunc.config.getoption("--all-families") else {}))


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_none_changes_nothing(case, backend):
    original, patched = made(case), made(case)
    for model in (original, patched):
        model.set_attn_implementation(backend)
    before = fingerprint(patched)
    patch_model(patched, "none")
    assert patched_layers(patched)
    for batch in batches(case):
        expected = step(original, batch)
        assert torch.isfinite(expected["loss"])
        assert_identical(step(patched, batch), expected)
    assert fingerprint(unpatch_model(patched)) == before
    assert_identical(step(patched, batches(case)[-1]), step(original, batches(case)[-1]))


def test_norm_and_cap(case, tmp_path):
    """It trains every new parameter, saves and loads by its Auto class, and is unpatched."""
    model, batch = made(case), batches(case)[-1]
    before, expected = fingerprint(model), step(model, batch)
    randomise(patch_model(model, replace(SCHEMES["qk_norm_cap"], q="layer", k="layer", softcap=2.0)))
    result = step(model, batch)
    assert all(torch.isfinite(x).all() for x in result.values())
    assert (result["out"] - expected["out"]).abs().max() > 1e-3, "norm and cap act"
    added = result.keys() - expected.keys()
    assert len(added) == 4 * len(patched_layers(model)), "weight and bias of both norms"
    assert all(result[name].abs().max() > 0 for name in added)

    model.save_pretrained(tmp_path)
    auto = auto_of(case)
    again = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        assert torch.equal(seen(again, batch), seen(model, batch))
    again = (type(model) if issubclass(auto, PreTrainedModel) else auto).from_pretrained(tmp_path)
    assert type(again) is type(model) is derived_model(type(model).base_class)
    assert again.config.scheme == model.config.scheme
    with torch.no_grad():
        assert torch.equal(seen(again, batch), seen(model, batch))

    unpatch_model(model)
    after = fingerprint(model)
    assert after[0] is before[0]
    assert after[3:] == before[3:]
    assert_identical(step(model, batch), expected)


def test_backends_agree(case):
    model = made(case)
    for batch in batches(case):
        assert_backends_agree(model, partial(seen, model, batch), TOLERANCE, BACKENDS)


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_what_each_token_sees(case, backend):
    """The first output moves with the last input, unless the model is causal; padding moves nothing."""
    model_type = type_of(case)
    model = patch_model(made(case), "qk_norm_cap", attn_implementation=backend).base_model
    changed = batch = {name: x for name, x in batches(case)[-1].items() if name != "labels"}
    if model_type in IMAGES:
        changed = batch | {"pixel_values": batch["pixel_values"].clone()}
        changed["pixel_values"][..., -4:, -4:] += 1
    else:
        assert (batch["attention_mask"][0, -6:] == 0).all()
        changed = batch | {"input_ids": batch["input_ids"].clone()}
        changed["input_ids"][0, -6:] = 7
        assert_near(seen(model, changed), seen(model, batch), 1e-6, "padding")
        changed["input_ids"][1, -1] += 1
    moved = (out_of(model(**changed)) - out_of(model(**batch)))[1 if model_type not in IMAGES else 0, 0].abs().max()
    assert (moved > 1e-5) == (model_type != "clip_text_model")


@torch.no_grad()
def test_the_norm_before_attention_is_folded(case):
    model_type = type_of(case)
    if not FAMILIES[model_type].pre_norm:
        pytest.skip("its norm stands behind attention")
    model, batch = made(case), batches(case)[-1]
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1 and "norm" in name:
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    expected = seen(model, batch)
    patch_model(model, "qkv_norm")
    with as_unpatched(model):
        assert_near(seen(model, batch), expected, 1e-3)


@pytest.mark.parametrize(
    ("model_class", "settings", "length"),
    [
        ("ViTModel", {}, 16),
        ("ViTModel", {"image_size": (16, 8), "patch_size": [8, 2]}, 8),
        ("SiglipVisionModel", {"image_size": 20}, 25),
        ("SiglipTextModel", {}, 128),
    ],
)
def test_henrys_gain_is_that_of_the_longest_input(model_class, settings, length):
    """The patches of an image, or the positions of a text."""
    base = getattr(transformers, model_class)
    model = patch_model(base(tiny_config(base.config_class.model_type, **settings)), "henry")
    gains = [layer.q_norm.weight.item() for layer in patched_layers(model).values()]
    assert gains == pytest.approx([math.log2(length**2 - length)] * 2)


def test_methods_that_need_next_token_loss_refuse_encoders(case):
    if FAMILIES[type_of(case)].causal is True:
        pytest.skip("it is causal")
    model, data = made(case), [torch.arange(24)[None]]
    with pytest.raises(ValueError, match="has bidirectional attention and predicts no next token"):
        inspect_model(model, data)
    patch_model(model, "qk_norm")
    if type_of(case) not in IMAGES and model.get_output_embeddings() is None:
        assert calibrate(model, data, knee=1.0).chosen is None  # there are no predictions to judge gains by
        return
    message = 'takes "pixel_values", and a batch has input_ids'
    if type_of(case) not in IMAGES:
        message = 'predicts masked tokens: give batches with "input'
    with pytest.raises(ValueError, match=message):
        calibrate(model, data, method="moments")


def test_a_masked_language_model_is_calibrated_on_its_masked_tokens():
    torch.manual_seed(0)
    config = tiny_config("bert", is_decoder=False, initializer_range=0.3)
    model = transformers.AutoModelForMaskedLM.from_config(config).eval()
    ids = torch.randint(3, config.vocab_size, (20, 4, 32))
    labels = torch.where(torch.rand(ids.shape) < 0.2, ids, -100)
    data = [{"input_ids": x.where(y < 0, 2), "labels": y} for x, y in zip(ids, labels, strict=True)]
    with torch.no_grad():
        unpatched = model(**data[0]).loss
        patch_model(model, "qk_norm")
        fresh = model(**data[0]).loss
        report = calibrate(model, data, knee=4.0)
        _, judged = divided(data, *HELD_OUT)
        losses = [model(**batch).loss * (batch["labels"] >= 0).sum() for batch in judged]
        targets = sum((batch["labels"] >= 0).sum() for batch in judged)
    assert report.judged == sum(batch["input_ids"].numel() for batch in judged)
    assert report.loss == pytest.approx(float(sum(losses) / targets), rel=1e-5)
    assert report.ones.loss != pytest.approx(report.loss)
    assert report.chosen.kl < report.ones.kl / 2
    assert calibrate(model, data).knee > 0  # it searches for a knee
    assert unpatched != fresh
