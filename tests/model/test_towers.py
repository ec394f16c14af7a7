"""Multimodal models: the text tower or a named one is patched, and the checkpoint of the whole model restores it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForImageTextToText, CLIPConfig, CLIPModel, PreTrainedModel

from hf_qknorm import SCHEMES, Scheme, calibrate, patch_model, unpatch_model
from hf_qknorm.model.attention import head_norms, patched_layers
from qknorm_tests.folders import edit
from qknorm_tests.kneed import knees_of
from qknorm_tests.tables import assert_identical, fingerprint, make_batch, randomise, sharp_model, step
from qknorm_tests.tiny import tiny_config
from qknorm_tests.tiny_towers import IMAGE_TOKEN, TOWERS, tiny_towers


@pytest.fixture(params=TOWERS)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


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


def test_the_whole_checkpoint_has_the_patched_tower(case, tmp_path):
    model, batch = tiny_towers(case), batch_for(case)
    expected = step(model, batch)
    randomise(patch_model(model, "qk_norm_cap"))
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


def test_a_checkpoint_without_the_norms_is_refused(case, tmp_path):
    patch_model(tiny_towers(case), "qk_norm").save_pretrained(tmp_path)
    edit(tmp_path, lambda weights: weights.pop(next(x for x in weights if x.endswith("1.self_attn.q_norm.weight"))))
    with pytest.raises(ValueError, match=r"1 norm tensors are missing from the weights, first .*q_norm\.weight"):
        AutoModelForImageTextToText.from_pretrained(tmp_path)


def test_the_text_tower_is_calibrated_by_itself():
    """For a model of text it makes no difference that a vision tower is beside it."""
    model = patch_model(tiny_towers("llava"), "qk_norm")
    batches = [text_batch()["input_ids"] for _ in range(2)]
    with pytest.raises(ValueError, match=r"calibrate\(model\.model\.language_model, data\)"):
        calibrate(model, batches, "moments")
    alone = patch_model(AutoModel.from_config(tiny_config("llama", initializer_range=0.2)).eval(), "qk_norm")
    alone.load_state_dict(model.model.language_model.state_dict())
    report = calibrate(model.model.language_model, batches, "moments")
    assert report == calibrate(alone, batches, "moments")
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
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert torch.equal(logits(again, batch), logits(model, batch))
    assert (logits(model, batch) - expected["logits"]).abs().max() > 1e-3
    assert fingerprint(unpatch_model(model)) == before
    assert_identical(step(model, batch), expected)


@pytest.fixture
def kneed(tmp_path: Path) -> Path:
    """A checkpoint whose text tower has knees, and whose vision tower has norms without."""
    model = randomise(patch_model(tiny_towers("llava"), Scheme(q="rms", k="rms")), knee=4.0)
    patch_model(model, "qk_norm", tower="vision_tower")
    model.save_pretrained(tmp_path)
    return tmp_path


def test_a_tower_saves_and_loads_its_knees(kneed):
    expected = knees_of(AutoModelForImageTextToText.from_pretrained(kneed))
    again = knees_of(AutoModelForImageTextToText.from_pretrained(kneed, dtype=torch.float16))
    assert {name: knee.tolist() for name, knee in again.items()} == {n: knee.tolist() for n, knee in expected.items()}
    assert len({*map(str, expected.values())}) == 5  # four in the text tower


def test_an_invalid_knee_of_a_tower_is_refused(kneed):
    weights = load_file(kneed / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.1.self_attn.k_norm.knee"))
    edit(kneed, lambda weights: weights[name].fill_(float("nan")))
    with pytest.raises(ValueError, match=r"k_norm\.knee' is \[nan, nan, nan\], expected three finite numbers"):
        AutoModelForImageTextToText.from_pretrained(kneed)
    edit(kneed, lambda weights: weights.pop(name))
    with pytest.raises(ValueError, match=r"no '.*k_norm\.knee' is in the weights: they were written by"):
        AutoModelForImageTextToText.from_pretrained(kneed)


def refuse(model: PreTrainedModel, **kwargs: Any) -> str:
    before = fingerprint(model)
    with pytest.raises(ValueError, match="tower|not supported") as refusal:
        patch_model(model, "soft_cap", **kwargs)
    assert fingerprint(model) == before
    return str(refusal.value)


def test_unknown_towers_are_refused():
    assert "model.vision_tower, model.language_model" in refuse(tiny_towers("llava"), tower="audio_tower")
    assert "it has no towers" in refuse(sharp_model("llama"), tower="vision_tower")
    assert "from a fixed class" in refuse(tiny_towers("idefics3"), tower="vision_model")


def test_a_model_that_builds_its_tower_from_a_fixed_class():
    parts = {f"{x}_config": tiny_config(f"clip_{x}_model").to_dict() for x in ("text", "vision")}
    message = refuse(CLIPModel(CLIPConfig(**parts)))
    assert "a checkpoint of the whole model would lose the scheme" in message
    assert "patch_model(model.text_model, ...)" in message
