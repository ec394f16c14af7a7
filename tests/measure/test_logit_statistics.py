"""Statistics of the logits against those of a reference."""

from typing import Any

import pytest
import torch
from transformers import AutoModel, BartForConditionalGeneration, Siglip2VisionConfig, Wav2Vec2Config

from hf_qknorm import logit_statistics, patch_model
from hf_qknorm.measure import logit_statistics as measured
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.install import install
from qknorm_tests.tables import MODEL_TYPES, fingerprint, make_batch, sharp_model
from qknorm_tests.tables import random_tokens as tokens
from qknorm_tests.tiny import tiny_config, tiny_model


@pytest.mark.parametrize("backend", ["hf_qknorm", "eager"])
def test_padding_on_either_side_does_not_count(backend):
    model = patch_model(sharp_model("llama"), "none", attn_implementation=backend)
    rows = [tokens(1, n, seed=n) for n in (14, 20)]
    found = {}
    for side in ("alone", "left", "right"):
        with torch.no_grad(), logit_statistics(model, cap=2.0) as found[side]:
            if side == "alone":
                for row in rows:
                    model(row)
                continue
            pad = (6, 0) if side == "left" else (0, 6)
            short, mask = (torch.nn.functional.pad(x, pad) for x in (rows[0], torch.ones_like(rows[0])))
            mask = torch.cat([mask, torch.ones_like(rows[1])])
            model(torch.cat([short, rows[1]]), mask)  # the mask as a positional argument
    for name, alone in found["alone"].items():
        queries = torch.tensor([14.0, 20.0])
        entropy = (torch.stack(alone.entropies) * queries[:, None]).sum(0) / queries.sum()
        even = torch.cat([torch.arange(1, n + 1).log() for n in (14, 20)]).mean()
        assert (alone.over_half > 0).all()
        for side in ("left", "right"):
            padded = found[side][name]
            torch.testing.assert_close(padded.entropy, entropy, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(padded.even, even)
            for field in ("max_logit", "over_half", "over_cap"):
                torch.testing.assert_close(getattr(padded, field), getattr(alone, field), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["hf_qknorm", "eager", "sdpa"])
def test_padding_of_a_sound_does_not_count(backend):
    """Its mask has an entry for each sample, and a layer has fewer queries."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    convolutions = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
    config = Wav2Vec2Config(**sizes, **convolutions, num_conv_pos_embedding_groups=2, feat_extract_norm="layer")
    model, found = patch_model(AutoModel.from_config(config).eval(), "none", attn_implementation=backend), []
    for padding in (0, 600):
        sound, mask = (torch.nn.functional.pad(x, (0, padding)) for x in (torch.linspace(-1, 1, 400), torch.ones(400)))
        with torch.no_grad(), logit_statistics(model, cap=0.1) as statistics:
            model(sound[None], mask[None].long())
        found += statistics.values()
    for field in ("max_logit", "counts", "entropy"):
        torch.testing.assert_close(*(getattr(entry, field) for entry in found))


def test_padding_of_an_image_does_not_count():
    """Its mask is of patches, and has another name."""
    config = Siglip2VisionConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_patches=16)
    model, found, patches = patch_model(AutoModel.from_config(config).eval(), "none"), [], torch.randn(1, 6, 768)
    for padding in (0, 10):
        mask = torch.arange(6 + padding)[None] < 6
        with torch.no_grad(), logit_statistics(model) as statistics:
            model(torch.nn.functional.pad(patches, (0, 0, 0, padding)), mask.long(), torch.tensor([[2, 3]]))
        found += statistics.values()
    assert torch.equal(*(entry.counts for entry in found))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("family", "backend"), [("llama", "hf_qknorm"), ("llama", "eager"), ("mistral", "sdpa"), ("gemma2", "hf_qknorm")]
)
def test_generation_has_the_same_statistics_with_any_cache(family, backend, side):
    """Also with the masks that `generate` makes for a static one, which hold no padding of their own."""
    model = patch_model(sharp_model(family), "none", attn_implementation=backend)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, slice(0, 5) if side == "left" else slice(-5, None)] = 0
    settings = {"attention_mask": mask, "min_new_tokens": 2, "max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    found = {}
    for cache in ("dynamic", "static"):
        with logit_statistics(model) as found[cache]:
            model.generate(tokens(2, 12), cache_implementation=cache, **settings)
    for name, entry in found["dynamic"].items():
        for field in ("max_logit", "entropy", "even", "over_half"):
            got, expected = getattr(found["static"][name], field), getattr(entry, field)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_statistics_are_those_of_logits_and_attention_weights(family):
    model = patch_model(sharp_model(family), "soft_cap", attn_implementation="hf_qknorm_eager")
    batch = make_batch("left", labels=False)
    calls = []
    for name, layer in patched_layers(model).items():
        layer.observers = (lambda layer, q, k, v, mask, options, name=name: calls.append((name, q, k, mask, options)),)
    with torch.no_grad():
        weights = dict(zip(patched_layers(model), model(**batch, output_attentions=True).attentions, strict=True))
    for layer in patched_layers(model).values():
        del layer.observers
    with torch.no_grad(), logit_statistics(model, cap=1.0) as statistics:
        model(**batch)
    assert [name for name, *_ in calls] == list(statistics)
    for name, q, k, _, options in calls:
        entry, rows = statistics[name], weights[name].sum(-1) > 0
        entropy = torch.special.entr(weights[name]).sum(-1)
        torch.testing.assert_close(entry.entropy, entropy.sum((0, 2)) / rows.sum((0, 2)), rtol=1e-4, atol=1e-5)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        raw = (q.double() @ k.double().transpose(-1, -2) * options["scaling"]).abs()
        seen = weights[name] > 0
        torch.testing.assert_close(entry.max_logit.double(), raw.where(seen, 0.0).amax((0, 2, 3)), rtol=1e-5, atol=0)
        pairs = seen.sum((0, 2, 3))
        for got, limit in ((entry.over_half, 0.5), (entry.over_cap, 1.0)):
            expected = (seen & (raw > limit)).sum((0, 2, 3)) / pairs
            tolerance = 1.5 / float(pairs.min())  # one at the threshold may round either way
            torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
        assert (entry.over_half > entry.over_cap).all()


@pytest.mark.parametrize("cap", [0.0, -1.0, float("nan")])
def test_an_impossible_cap_is_refused(cap):
    with pytest.raises(ValueError, match="cap is .*, expected a finite number > 0"):
        logit_statistics(tiny_model("llama"), cap)


def test_watching_ends_and_changes_nothing():
    model = patch_model(tiny_model("llama"), "qk_norm_cap")
    batch = tokens(2, 20)
    plain = model(batch).logits
    with pytest.raises(RuntimeError, match="stop"), logit_statistics(model) as statistics:  # noqa: PT012
        assert torch.equal(model(batch).logits, plain)
        raise RuntimeError("stop")
    assert len(statistics) == 2
    assert all(layer.observers == () for layer in patched_layers(model).values())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_other_observers_keep_observing():
    model = patch_model(tiny_model("llama"), "qk_norm_cap")
    calls, (first, *_) = [], patched_layers(model).values()
    first.observers = others = (lambda *arguments: calls.append(1),)
    with torch.no_grad(), logit_statistics(model) as statistics:
        model(tokens(2, 20))
    assert calls == [1]
    assert first.observers == others
    with torch.no_grad(), logit_statistics(model):
        late, first.observers = first.observers, (lambda *arguments: [observe(*arguments) for observe in late],)
        model(tokens(2, 20))
    model(tokens(2, 20))
    assert first.observers != others  # the newest observer stays and still calls the older ones
    assert calls == [1, 1, 1]
    assert all(len(entry.entropies) == 1 for entry in statistics.values())


def test_packed_sequences_are_separate():
    model = patch_model(tiny_model("llama", initializer_range=0.2), "qk_norm_cap")
    rows = tokens(2, 10)
    places = torch.arange(10).repeat(2)[None]
    ends = torch.tensor([0, 10, 20], dtype=torch.int32)
    with torch.no_grad(), logit_statistics(model) as apart:
        model(rows, use_cache=False)
    with torch.no_grad(), logit_statistics(model) as packed:
        # with a mask of ones, transformers does not infer packing from the positions
        model(rows.view(1, -1), torch.ones(1, 20), position_ids=places, cu_seq_lens_q=ends, use_cache=False)
    for name, entry in apart.items():
        torch.testing.assert_close(packed[name].max_logit, entry.max_logit, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(packed[name].entropy, entry.entropy, rtol=1e-5, atol=1e-6)


def test_the_padding_of_an_encoder_does_not_count():
    source, target = tokens(2, 12), tokens(2, 4, seed=1)
    padded, cut = torch.ones_like(source), source[:, :7]
    padded[:, 7:] = 0
    model = patch_model(BartForConditionalGeneration(tiny_config("bart")).eval(), "qk_norm")
    inputs = {"decoder_input_ids": target, "decoder_attention_mask": torch.ones_like(target)}
    found = []
    for ids, mask in ((source, padded), (cut, None)):
        with torch.no_grad(), logit_statistics(model) as seen:
            model(input_ids=ids, attention_mask=mask, **inputs)
        found.append(seen)
    for name, entry in found[1].items():
        for field in ("max_logit", "entropy", "even", "over_cap"):
            torch.testing.assert_close(getattr(found[0][name], field), getattr(entry, field), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupt_before_the_watch_begins_leaves_the_modules(late, monkeypatch):
    def interrupted(*args: Any) -> None:
        if late:
            install(*args)
        raise KeyboardInterrupt

    model = sharp_model("llama")
    before = fingerprint(model)
    monkeypatch.setattr(measured, "install", interrupted)
    with pytest.raises(KeyboardInterrupt), logit_statistics(model):
        pass
    assert fingerprint(model) == before
    assert not patched_layers(model)
