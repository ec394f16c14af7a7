"""Folding the norm before attention: exact without biases, and undone within `as_unpatched`."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from transformers import LlamaConfig, LlamaForCausalLM

from hf_qknorm import SCHEMES, Scheme, calibrate, patch_model
from hf_qknorm.calibration.gains import rescale_folded_weights
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.fold import is_exact
from hf_qknorm.model.install import as_unpatched
from qknorm_tests.covering import covering
from qknorm_tests.kneed import logits
from qknorm_tests.tables import MODEL_TYPES, Codes, applies, assert_near, fingerprint, make_batch, trained_like
from qknorm_tests.tiny import TINY

FOLDED = Scheme(q="auto", k="auto", v="auto", pre_norm=False, eps=1e-12)
KEPT = Scheme(q="auto", k="auto", v="auto", eps=1e-12)
TYPES = [model_type for model_type in MODEL_TYPES if applies(model_type, SCHEMES["qkv_norm"])]


@pytest.mark.parametrize(("model_type", "spread"), covering(TYPES, [False, True], strength=1))
def test_as_unpatched_restores_a_folded_norm(model_type, spread):
    model = trained_like(model_type)
    expected = logits(model)
    patch_model(model, "qkv_norm")
    if spread:
        rescale_folded_weights(model, [make_batch("left", labels=False)])
    with as_unpatched(model):
        assert_near(logits(model), expected, 2e-5)
    assert not torch.allclose(logits(model), expected, atol=1e-2)


@pytest.mark.parametrize("model_type", TYPES)
def test_without_biases_the_fold_is_exact(model_type):
    """The scheme's norms remove the scale that the folded norm removed: with or without it, the same result."""
    folded = trained_like(model_type, biases=False)
    kept = copy.deepcopy(folded)
    assert is_exact(patch_model(folded, FOLDED))
    assert_near(logits(folded), logits(patch_model(kept, KEPT)), 2e-5)


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "qwen2"])
def test_with_biases_the_spread_of_the_text_makes_it_close(model_type):
    folded = trained_like(model_type)
    expected = logits(patch_model(copy.deepcopy(folded), KEPT))
    patch_model(folded, FOLDED)
    assert not is_exact(folded)
    far = (logits(folded) - expected).norm()
    rescale_folded_weights(folded, [make_batch("plain", labels=False)])
    assert (logits(folded) - expected).norm() < 0.3 * far


def test_the_spread_is_the_mean_sigma_of_real_tokens():
    model = trained_like("gpt2")
    seen = []
    hook = model.transformer.h[0].ln_1.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    batches = [make_batch("left", labels=False), {"input_ids": make_batch("plain")["input_ids"][:, :8]}]
    for batch in batches:
        model(**batch)
    hook.remove()
    rows = torch.cat([seen[0][batches[0]["attention_mask"].bool()], seen[1].flatten(0, 1)]).double()
    expected = (rows.var(-1, unbiased=False) + model.config.layer_norm_epsilon).sqrt().mean()
    calibrate(patch_model(model, "qkv_norm"), batches)
    first, _ = (layer.removed_norm[0].spread for layer in patched_layers(model).values())
    assert first == pytest.approx(expected.item(), rel=1e-4)


def test_models_that_can_not_be_folded_are_refused_unchanged():
    with torch.device("meta"):
        meta = LlamaForCausalLM(LlamaConfig(**TINY))
    homeless = trained_like("gpt_neox", attention_bias=False)
    computed = trained_like("llama")
    weight_norm(computed.model.layers[0].self_attn.q_proj)
    quantised = trained_like("llama")
    q_proj = quantised.model.layers[0].self_attn.q_proj
    q_proj.weight = nn.Parameter(q_proj.weight.data.as_subclass(Codes))
    for model, message in (
        (meta, "not in memory"),
        (computed, "one of them has no plain parameter as its weight"),
        (quantised, "one of them has no plain parameter as its weight"),
        (homeless, "its norm has a bias, and its projections have no bias"),
    ):
        before = fingerprint(model)
        with pytest.raises(ValueError, match=message):
            patch_model(model, "qkv_norm")
        assert fingerprint(model) == before
