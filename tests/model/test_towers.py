"""Multimodal models: the text tower or a named one is patched, and the checkpoint of the whole model restores it."""

from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForImageTextToText, CLIPConfig, CLIPModel, PreTrainedModel
from transformers.models.qwen2_vl import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from hf_qknorm import SCHEMES, calibrate, patch_model, unpatch_model
from hf_qknorm.model.attention import head_norms, patched_layers
from qknorm_tests.tables import assert_identical, fingerprint, make_batch, randomise, sharp_model, step
from qknorm_tests.tiny import tiny_config
from qknorm_tests.tiny_towers import IMAGE_TOKEN, TOWERS, tiny_towers
from qknorm_tests.vision_cases import AXES

every_tower = pytest.mark.parametrize("case", TOWERS)


def text_batch() -> dict[str, Any]:
    batch = make_batch("right")
    batch["input_ids"] = batch["input_ids"] % IMAGE_TOKEN
    return batch


def image_batch() -> dict[str, Any]:
    """LLaVA's: seventeen places for the patches of an image and its class token."""
    generator = torch.Generator().manual_seed(0)
    batch = text_batch()
    tokens = torch.full((2, 17), IMAGE_TOKEN)
    return {
        "input_ids": torch.cat([tokens, batch["input_ids"]], 1),
        "attention_mask": torch.cat([torch.ones_like(tokens), batch["attention_mask"]], 1),
        "labels": torch.cat([torch.full_like(tokens, -100), batch["labels"]], 1),
        "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
    }


def logits(model: PreTrainedModel, batch: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch).logits


def batch_for(case: str) -> dict[str, Any]:
    return image_batch() if case == "llava" else text_batch()


@every_tower
def test_none_changes_nothing(case):
    original, patched, batch = tiny_towers(case), tiny_towers(case), batch_for(case)
    step(patched, batch)  # leaves marks on the modules
    before = fingerprint(patched)
    assert patch_model(patched, "none") is patched
    tower = patched.base_model.get_submodule(TOWERS[case][2])
    assert patched_layers(patched).keys() == {f"model.{TOWERS[case][2]}.{name}" for name in patched_layers(tower)}
    assert_identical(step(patched, batch), step(original, batch))
    assert fingerprint(unpatch_model(patched)) == before
    assert_identical(step(patched, batch), step(original, batch))


@every_tower
def test_the_whole_checkpoint_has_the_patched_tower(case, tmp_path):
    model, batch = tiny_towers(case), batch_for(case)
    expected = step(model, batch)
    randomise(patch_model(model, "qk_norm_cap"), knee=4.0)
    result = step(model, batch)
    added = result.keys() - expected.keys()
    assert len(added) >= 2 * len(patched_layers(model)) > 0
    assert all(torch.isfinite(result[name]).all() and result[name].abs().max() > 0 for name in added)
    model.save_pretrained(tmp_path)
    again, info = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(again) is type(model)
    assert again.config.text_config.scheme == SCHEMES["qk_norm_cap"].resolve()
    assert again.config.text_config._attn_implementation == "hf_qknorm"
    assert torch.equal(logits(again, batch), logits(model, batch))
    assert_identical(step(unpatch_model(model), batch), expected)


def test_the_text_tower_is_calibrated_by_itself():
    """For a model of text it makes no difference that a vision tower is beside it."""
    model = patch_model(tiny_towers("llava"), "qk_norm")
    batches = [text_batch()["input_ids"] for _ in range(2)]
    with pytest.raises(ValueError, match=r"calibrate\(model\.model\.language_model, data\)"):
        calibrate(model, batches, knee=0)
    alone = patch_model(AutoModel.from_config(tiny_config("llama", initializer_range=0.2)).eval(), "qk_norm")
    alone.load_state_dict(model.model.language_model.state_dict())
    assert calibrate(model.model.language_model, batches, knee=0) == calibrate(alone, batches, knee=0)
    gains = [norm.weight for layer in patched_layers(model).values() for norm in head_norms(layer).values()]
    assert len(gains) == 4
    assert all(float((gain.detach() - 1).abs().max()) > 0.01 for gain in gains)
    assert_identical(model.model.language_model.state_dict(), alone.state_dict())


def test_a_named_tower(tmp_path):
    model, batch = tiny_towers("llava"), image_batch()
    expected = step(model, batch)
    model.save_pretrained(tmp_path / "base")  # which writes into the config too
    before = fingerprint(model)
    randomise(patch_model(model, "qk_norm", tower="vision_tower"))
    assert all(name.startswith("model.vision_tower.") for name in patched_layers(model))
    capped = patch_model(model, "soft_cap")  # the text tower, besides
    assert len(patched_layers(capped)) == 4
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForImageTextToText.from_pretrained(tmp_path), batch), logits(model, batch))
    assert (logits(model, batch) - expected["logits"]).abs().max() > 1e-3
    assert fingerprint(unpatch_model(model)) == before
    assert_identical(step(model, batch), expected)


def clip() -> PreTrainedModel:
    return CLIPModel(
        CLIPConfig(**{f"{x}_config": tiny_config(f"clip_{x}_model").to_dict() for x in ("text", "vision")})
    )


def qwen_vl() -> PreTrainedModel:
    """Its config builds the text config from transformers' own class."""
    text = tiny_config("qwen2_vl_text", rope_parameters=AXES).to_dict()
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision))


@pytest.mark.parametrize(
    ("make", "tower", "message"),
    [
        (lambda: tiny_towers("llava"), "audio_tower", r"model\.vision_tower, model\.language_model"),
        (lambda: sharp_model("llama"), "vision_tower", "it has no towers"),
        (lambda: tiny_towers("idefics3"), "vision_model", "from a fixed class"),
        (clip, None, r"a checkpoint of the whole model would lose the scheme.*patch_model\(model\.text_model, \.\.\."),
        (qwen_vl, None, r"from a fixed class .* patch_model\(model\.model\.language_model"),
    ],
)
def test_a_tower_that_is_not_there_or_would_lose_its_scheme_is_refused(make, tower, message):
    model = make()
    before = fingerprint(model)
    with pytest.raises(ValueError, match=message):
        patch_model(model, "soft_cap", tower=tower)
    assert fingerprint(model) == before
