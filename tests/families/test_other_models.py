"""Models that are no causal language models of tokens alone: of images, bidirectional, with an encoder, of codebooks.

`test_sweep.py` runs over them too.
"""

import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import MoshiForConditionalGeneration, PreTrainedModel

from hf_qknorm import FAMILIES, Scheme, calibrate, inspect_model, patch_model, unpatch_model
from hf_qknorm.calibration.calibrate import HELD_OUT
from hf_qknorm.families.style import CACHE
from hf_qknorm.measure.batches import divided
from hf_qknorm.model.attention import patched_layers
from qknorm_tests.error_budget import error
from qknorm_tests.tables import assert_near, fingerprint, randomise, sharp_model
from qknorm_tests.tiny import tiny_config
from qknorm_tests.vision_cases import IMAGES, batches, made, type_of


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


@pytest.mark.parametrize("alone", ["bert", "siglip_text_model", "vit", "vit-masked", "deit-classifier"])
def test_methods_that_need_next_token_loss_refuse_encoders(alone):
    model, data = made(alone), [torch.arange(24)[None]]
    with pytest.raises(ValueError, match="has bidirectional attention and predicts no next token"):
        inspect_model(model, data)
    patch_model(model, "qk_norm")
    if type_of(alone) not in IMAGES and model.get_output_embeddings() is None:
        assert calibrate(model, data, knee=1.0).chosen is None  # there are no predictions to judge gains by
        return
    message = 'takes "pixel_values", and a batch has input_ids'
    if type_of(alone) not in IMAGES:
        message = 'predicts masked tokens: give batches with "input'
    with pytest.raises(ValueError, match=message):
        calibrate(model, data, knee=0)


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


@torch.no_grad()
def generated(model: PreTrainedModel, batch: dict[str, Any], **options: Any) -> Tensor:
    """The logits that greedy tokens are taken by."""
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": 1} | options
    out = transformers.GenerationMixin.generate(
        model, **batch, **settings, return_dict_in_generate=True, output_logits=True
    )
    return torch.stack(out.logits)


@torch.no_grad()
def test_a_decoder_is_patched_in_a_model_with_an_image_encoder(tmp_path):
    def captioner() -> PreTrainedModel:
        torch.manual_seed(0)
        encoder = transformers.AutoModel.from_config(tiny_config("vit"))
        settings = {"add_cross_attention": True, "is_decoder": True}
        decoder = transformers.AutoModelForCausalLM.from_config(tiny_config("mbart", **settings))
        model = transformers.VisionEncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
        model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 1
        model.config.pad_token_id = 0
        return model

    batch = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    target = torch.arange(3, 8).repeat(2, 1)
    original, model = captioner(), patch_model(captioner(), "none")
    assert torch.equal(model(**batch, labels=target).loss, original(**batch, labels=target).loss)

    model = randomise(patch_model(unpatch_model(model), "qk_norm_cap"))
    assert len(patched_layers(model)) == 4, "twice two of the decoder"
    assert_near(generated(model, batch), generated(model, batch, use_cache=False), 1e-4)

    both = patch_model(patch_model(captioner(), Scheme(softcap=0.05), tower="encoder"), Scheme(softcap=0.05))
    logits = both(**batch, labels=target).logits
    assert error(logits, original(**batch, labels=target).logits) > 1e-4
    both.save_pretrained(tmp_path)
    again = transformers.VisionEncoderDecoderModel.from_pretrained(tmp_path)
    assert len(patched_layers(again)) == len(patched_layers(both)) == 6
    assert_near(again(**batch, labels=target).logits, logits, 1e-6)


@torch.no_grad()
def test_the_cache_holds_the_encoder_s_normed_keys():
    model = randomise(patch_model(made("bart"), "qk_norm"))
    source = {name: x for name, x in batches("bart")[-1].items() if name != "labels"}
    result = model(**source, decoder_input_ids=torch.arange(3, 8).expand(2, -1), use_cache=True)
    states, cache = result.encoder_last_hidden_state, result[CACHE].cross_attention_cache
    across = [layer for name, layer in patched_layers(model).items() if "encoder_attn" in name]
    assert len(across) == 2
    for index, layer in enumerate(across):
        heads, _, width = FAMILIES["bart"].style.heads(layer)
        key = layer.k_proj(states).view(2, -1, heads, width)
        assert_near(cache.layers[index].keys, layer.k_norm(key).transpose(1, 2), 1e-6)


@torch.no_grad()
def test_whisper_folds_an_encoder_s_batch_of_another_size_as_its_own_model_does():
    batch = {"input_features": batches("whisper")[-1]["input_features"].repeat(3, 1, 1)[:3]}
    for scheme in (Scheme(softcap=1e6), Scheme(q="rms", gain="none")):
        model, tokens = made("whisper"), torch.arange(3, 8)[None]
        expected = model(**batch, decoder_input_ids=tokens).logits
        found = patch_model(model, scheme)(**batch, decoder_input_ids=tokens).logits
        assert found.shape == expected.shape
        assert scheme.norms or error(found, expected) < 1e-5


def test_a_decoder_alone_is_calibrated_without_its_cross_attention():
    model = patch_model(sharp_model("bart"), "qk_norm")
    report = calibrate(model, [torch.arange(3, 35)[None]] * 2, knee=0)
    assert list(report.layers) == [f"model.decoder.layers.{i}.self_attn" for i in range(2)]
    gains = {name: norm.weight for name, norm in model.named_modules() if name.endswith(("q_norm", "k_norm"))}
    assert all(("self_attn" in name) == bool((gain != 1).any()) for name, gain in gains.items())


def test_a_model_with_layers_of_two_configs_is_refused():
    """Moshi's depth decoder has the attention class of its decoder; the latter is patched by itself."""
    depth = {"num_codebooks": 2, "hidden_size": 32, "input_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    parts = {
        "audio_encoder_config": {"model_type": "mimi"},
        "depth_decoder_config": {**depth, "ffn_dim": 64, "audio_vocab_size": 16},
    }
    with torch.device("meta"):
        model = MoshiForConditionalGeneration(tiny_config("moshi", audio_vocab_size=16, **parts))
    before = fingerprint(model)
    with pytest.raises(ValueError, match=r"has a MoshiDepthConfig.*patch_model\(model.decoder"):
        patch_model(model, "qk_norm_cap")
    assert fingerprint(model) == before
    assert len(patched_layers(patch_model(model.decoder, "qk_norm_cap"))) == 2
