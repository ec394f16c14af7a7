"""Calibration of models that predict no tokens, judged by their last hidden states."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_qknorm import Calibration, Scheme, calibrate, patch_model
from hf_qknorm.calibration.knees import OUTPUT_LIMIT
from hf_qknorm.measure.predictions import output_error
from hf_qknorm.model.install import as_unpatched
from qknorm_tests.tiny import tiny_config
from qknorm_tests.vision_cases import made


def encoder(model_type: str, auto=AutoModel):
    """A model with weights large enough for its attention to matter."""
    torch.manual_seed(0)
    return auto.from_config(tiny_config(model_type, initializer_range=0.3)).eval()


def batches(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Random tokens above the special ones, with padding in the last row of each batch."""
    found = []
    for i in range(count):
        ids = torch.randint(3, 64, (4, 24), generator=torch.Generator().manual_seed(seed + i))
        mask = torch.ones_like(ids)
        mask[-1, 16:] = 0
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


@torch.no_grad()
def pooled(model, batch) -> torch.Tensor:
    """The mean of the last hidden states over real tokens, `[B, D]`."""
    mask = batch["attention_mask"][..., None]
    return (model.base_model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)


def test_a_model_of_a_user_s_own_is_judged_by_its_first_output():
    model = patch_model(encoder("llama", AutoModelForCausalLM), "qk_norm")
    model.base_model_prefix, model.get_output_embeddings = "", lambda: None
    assert 0 < calibrate(model, batches(6)).output_error <= OUTPUT_LIMIT


@pytest.mark.parametrize(
    ("model_type", "auto"), [("bert", AutoModelForSequenceClassification), ("llama", AutoModel), ("gpt2", AutoModel)]
)
def test_embeddings_keep_their_direction(model_type, auto):
    model = patch_model(encoder(model_type, auto), "qk_norm")
    report = calibrate(model, batches(6))
    assert report.base is report.chosen is None
    assert report.sharpness == 8
    assert 0 < report.output_error <= OUTPUT_LIMIT
    assert f"hidden states change by {report.output_error:.2%}" in str(report)
    assert Calibration.from_dict(report.to_dict()) == report
    for batch in batches(2, seed=100):
        with as_unpatched(model):
            expected = pooled(model, batch)
        assert F.cosine_similarity(pooled(model, batch), expected).mean() > 0.998


def test_the_error_is_relative_and_ignores_padding():
    model = patch_model(encoder("bert"), Scheme(q="rms", k="rms"))
    (batch,) = batches(1)
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        own = model(**batch).last_hidden_state[real]
        with as_unpatched(model):
            base = model(**batch).last_hidden_state[real]
    assert output_error(model, [batch]) == pytest.approx(float((own - base).norm() / base.norm()), rel=1e-5)
    other = batch | {"input_ids": batch["input_ids"].masked_fill(~real, 5)}
    assert output_error(model, [other]) == pytest.approx(output_error(model, [batch]), rel=1e-5)


@pytest.mark.parametrize("case", ["siglip_vision_model", "vit"])
def test_an_encoder_of_images_is_calibrated(case):
    model = patch_model(made(case), "qk_norm")
    generator = torch.Generator().manual_seed(1)
    images = [{"pixel_values": torch.randn(4, 3, 16, 16, generator=generator)} for _ in range(6)]
    report = calibrate(model, [image | {"labels": torch.zeros(4)} for image in images], max_tokens=20)
    assert (report.tokens, report.judged, report.length) == (20, 4, None)
    assert 0 < report.output_error <= OUTPUT_LIMIT
    assert "gains from 20 images; hidden states change by" in str(report)
    with torch.no_grad():
        own = model.base_model(**images[5]).last_hidden_state.mean(1)
        with as_unpatched(model):
            base = model.base_model(**images[5]).last_hidden_state.mean(1)
    assert F.cosine_similarity(own, base).mean() > 0.998


def test_a_scheme_that_changes_too_much_is_refused_and_undone():
    model = patch_model(encoder("bert"), Scheme(q="rms", k="rms", softcap=0.05))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="the knee 32 changes the last hidden states by .* of 0.05, .* give a knee"):
        calibrate(model, batches(4))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert calibrate(model, batches(4), knee=4).output_error > OUTPUT_LIMIT


def test_a_limit_on_the_loss_needs_predictions():
    with pytest.raises(ValueError, match="BertModel predicts no tokens, which max_loss_increase=0.01 compares"):
        calibrate(patch_model(encoder("bert"), "qk_norm"), batches(2), max_loss_increase=0.01)
