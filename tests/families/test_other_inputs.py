"""Models whose input is more than one text: encoder-decoders, whose three attentions are patched alike, and MusicGen.

`pytest --all-families` runs all encoder-decoders.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import MoshiForConditionalGeneration, PreTrainedModel

from hf_qknorm import FAMILIES, SCHEMES, Scheme, calibrate, patch_model, unpatch_model
from hf_qknorm.families.style import CACHE
from hf_qknorm.model.attention import patched_layers
from qknorm_tests.error_budget import error
from qknorm_tests.tables import (
    OWN_INPUTS,
    assert_backends_agree,
    assert_identical,
    assert_near,
    fingerprint,
    make_batch,
    randomise,
    sharp_model,
    step,
    use_backend,
)
from qknorm_tests.tiny import tiny_config

TOLERANCE = 1e-4
FEW = ("bart", "whisper", *OWN_INPUTS)
MORE = ("blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart")
LENGTH, BOOKS, FIRST = 12, 2, 8  # of MusicGen: tokens, codebooks, and tokens before those that are continued


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model_type" in metafunc.fixturenames:
        metafunc.parametrize("model_type", FEW + (MORE if metafunc.config.getoption("--all-families") else ()))


def auto_of(model_type: str) -> Any:
    return getattr(transformers, "AutoModelForSpeechSeq2Seq" if model_type == "whisper" else "AutoModelForSeq2SeqLM")


def made(model_type: str) -> PreTrainedModel:
    """A tiny model in eval mode whose attention logits spread over several nats, with no bias at zero."""
    if model_type in OWN_INPUTS:
        return sharp_model(model_type, attention_dropout=0.1)
    torch.manual_seed(0)
    model = auto_of(model_type).from_config(tiny_config(model_type, attention_dropout=0.1))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model.eval()


def codebooks(model_type: str, labels: bool) -> dict[str, Any]:
    """Tokens of which the first row is padded at the left, and a text to attend to."""
    generator = torch.Generator().manual_seed(0)
    mask, seen = torch.ones(2, LENGTH, dtype=torch.long), torch.ones(2, 7, dtype=torch.long)
    mask[0, :4], seen[1, 5:] = 0, 0
    batch = {
        "input_ids": torch.randint(3, 64, (2 * BOOKS, LENGTH), generator=generator),
        "encoder_hidden_states": torch.randn(2, 7, 64, generator=generator),
    }
    if model_type == "musicgen_decoder":  # the other puts the states in front of its input, and its steps mask neither
        batch |= {"attention_mask": mask, "encoder_attention_mask": seen}
    return batch | ({"labels": torch.randint(3, 64, (2, LENGTH, BOOKS), generator=generator)} if labels else {})


def batch_for(model_type: str, kind: str = "left", *, labels: bool = True) -> dict[str, Any]:
    """A source, with padding or without, and a target of another length; or codebooks."""
    if model_type in OWN_INPUTS:
        return codebooks(model_type, labels)
    batch = make_batch(kind, labels=False)
    if model_type == "whisper":
        batch = {"input_features": torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))}
    target = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    return batch | ({"labels": target} if labels else {})


@torch.no_grad()
def continued(model: PreTrainedModel, model_type: str, *, use_cache: bool = True) -> Tensor:
    """The logits of the tokens after a prompt, each computed by itself with a cache, or all at once."""
    batch = batch_for(model_type, labels=False)
    if model_type not in OWN_INPUTS:
        return generated(model, batch, use_cache=use_cache)
    if not use_cache:
        return model(**batch).logits[:, FIRST - LENGTH :]
    others = {name: x for name, x in batch.items() if name not in ("input_ids", "attention_mask")}
    cache, found = None, []
    for start, stop in [(0, FIRST), *((n, n + 1) for n in range(FIRST, LENGTH))]:
        inputs = {"input_ids": batch["input_ids"][:, start:stop]}
        if "attention_mask" in batch:
            inputs["attention_mask"] = batch["attention_mask"][:, :stop]
        if start == 0 or model_type == "musicgen_decoder":  # the other has them in the cache
            inputs |= others
        out = model(**inputs, **{CACHE: cache}, use_cache=True)
        cache = out[CACHE]
        found.append(out.logits[:, -1])
    return torch.stack(found[1:], 1)


@torch.no_grad()
def generated(model: PreTrainedModel, batch: dict[str, Any], **options: Any) -> Tensor:
    """The logits that greedy tokens are taken by."""
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": 1} | options
    out = transformers.GenerationMixin.generate(
        model, **batch, **settings, return_dict_in_generate=True, output_logits=True
    )
    return torch.stack(out.logits)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_none_changes_nothing(model_type, backend):
    original, patched = made(model_type), made(model_type)
    use_backend(backend, original, patched)
    before = fingerprint(patched)
    patch_model(patched, "none")
    assert patched_layers(patched)
    if model_type not in OWN_INPUTS:
        assert len(patched_layers(patched)) == 6, "two of the encoder, and twice two of the decoder"
    for kind in ("plain", "left"):
        expected = step(original, batch_for(model_type, kind))
        assert torch.isfinite(expected["loss"])
        assert_identical(step(patched, batch_for(model_type, kind)), expected)
    assert torch.equal(continued(patched, model_type), continued(original, model_type))
    assert fingerprint(unpatch_model(patched)) == before
    assert_identical(step(patched, batch_for(model_type)), step(original, batch_for(model_type)))


def test_norm_and_cap(model_type, tmp_path):
    """Every new parameter trains; it saves and loads, generates the same with a cache, and is unpatched."""
    model, batch = made(model_type), batch_for(model_type)
    before, expected = fingerprint(model), step(model, batch)
    randomise(patch_model(model, replace(SCHEMES["qk_norm_cap"], softcap=2.0)), knee=4.0)
    result = step(model, batch)
    added = result.keys() - expected.keys()
    assert len(added) == len([n for n, _ in model.named_parameters() if "q_norm" in n or "k_norm" in n])
    assert all(result[name].abs().max() > 0 for name in added)
    assert error(result["logits"], expected["logits"]) > 1e-3
    assert_near(continued(model, model_type), continued(model, model_type, use_cache=False), TOLERANCE)

    pickle.loads(pickle.dumps(model)).save_pretrained(tmp_path)  # saving writes to the config
    again = (type(model) if model_type in OWN_INPUTS else auto_of(model_type)).from_pretrained(tmp_path)
    assert type(again) is type(model)
    with torch.no_grad():
        assert_near(again(**batch).logits, model(**batch).logits, 1e-6)
    assert fingerprint(unpatch_model(model)) == before
    assert_identical(step(model, batch), expected)


def test_backends_agree(model_type):
    model, batch = made(model_type), batch_for(model_type)
    rows = slice(None)
    if model_type in OWN_INPUTS:
        rows = batch.get("attention_mask", torch.ones(2, LENGTH)).bool().repeat_interleave(BOOKS, 0)
        batch.pop("labels")
    assert_backends_agree(model, lambda: model(**batch).logits[:, -LENGTH:][rows], TOLERANCE)


@torch.no_grad()
def test_a_decoder_is_patched_in_a_model_with_an_image_encoder(tmp_path):
    def made() -> PreTrainedModel:
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
    original, model = made(), patch_model(made(), "none")
    assert torch.equal(model(**batch, labels=target).loss, original(**batch, labels=target).loss)

    model = randomise(patch_model(unpatch_model(model), "qk_norm_cap"))
    assert len(patched_layers(model)) == 4, "twice two of the decoder"
    assert_near(generated(model, batch), generated(model, batch, use_cache=False), TOLERANCE)

    both = patch_model(patch_model(made(), Scheme(softcap=0.05), tower="encoder"), Scheme(softcap=0.05))
    logits = both(**batch, labels=target).logits
    assert error(logits, original(**batch, labels=target).logits) > TOLERANCE
    both.save_pretrained(tmp_path)
    again = transformers.VisionEncoderDecoderModel.from_pretrained(tmp_path)
    assert len(patched_layers(again)) == len(patched_layers(both)) == 6
    assert_near(again(**batch, labels=target).logits, logits, 1e-6)


@torch.no_grad()
def test_the_cache_holds_the_encoder_s_normed_keys():
    model = randomise(patch_model(made("bart"), "qk_norm"))
    result = model(**batch_for("bart", labels=False), decoder_input_ids=torch.arange(3, 8).expand(2, -1))
    states, cache = result.encoder_last_hidden_state, result[CACHE].cross_attention_cache
    across = [layer for name, layer in patched_layers(model).items() if "encoder_attn" in name]
    assert len(across) == 2
    for index, layer in enumerate(across):
        heads, _, width = FAMILIES["bart"].style.heads(layer)
        key = layer.k_proj(states).view(2, -1, heads, width)
        assert_near(cache.layers[index].keys, layer.k_norm(key).transpose(1, 2), 1e-6)


def test_a_decoder_alone_is_calibrated_without_its_cross_attention():
    model = patch_model(sharp_model("bart"), "qk_norm")
    report = calibrate(model, [torch.arange(3, 35)[None]] * 2, method="moments")
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
