"""Choosing a backend: a cap is never dropped, norm and cap survive every switch, and other outputs still work."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2ForCausalLM

from hf_qknorm import FAMILIES, SCHEMES, Scheme, patch_model
from hf_qknorm.attend.functions import CAP_BACKENDS, REGISTERED
from hf_qknorm.model.derived import QKNormModel
from qknorm_tests.covering import covering
from qknorm_tests.tables import (
    LENGTH,
    MODEL_TYPES,
    PAIRS,
    applies,
    assert_near,
    make_batch,
    randomise,
    real,
    sharp_model,
)

CAPPED = {"cap": Scheme(softcap=2.0), "norm and cap": Scheme(q="auto", k="auto", softcap=2.0)}
MODELS = covering(MODEL_TYPES, CAPPED, fits=lambda t, name: applies(t, CAPPED[name]), strength=1)
TOLERANCE = 1e-5


@contextmanager
def refusal(model_type: str, why: str = "can't cap attention logits") -> Iterator[None]:
    """A ValueError with this text, and the backends that can cap.

    A model with norms of its own runs its own forward, which passes no cap to other libraries' functions.
    """
    with pytest.raises(ValueError, match=re.escape(why)) as refused:
        yield
    for name in ("softcap=2", *(REGISTERED if FAMILIES[model_type].own_norms else CAP_BACKENDS)):
        assert name in str(refused.value)


@pytest.mark.parametrize(("model_type", "scheme"), MODELS)
def test_sdpa_with_a_cap_is_refused_at_once(model_type, scheme):
    model = sharp_model(model_type)
    with refusal(model_type):
        patch_model(model, CAPPED[scheme], attn_implementation="sdpa")
    assert not isinstance(model, QKNormModel)
    patch_model(model, CAPPED[scheme])
    with refusal(model_type):
        model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "hf_qknorm"
    model.config._attn_implementation = "sdpa"
    with refusal(model_type):
        model(**make_batch("plain"))


@pytest.mark.parametrize(("model_type", "scheme"), [("llama", "norm and cap"), ("qwen3", "cap")])
def test_loading_with_a_backend(model_type, scheme, tmp_path):
    """A model's own eager function has no cap."""
    randomise(patch_model(sharp_model(model_type), CAPPED[scheme])).save_pretrained(tmp_path)
    for name, why in (("sdpa", "can't cap attention logits"), ("no_such_backend", "is unknown")):
        with refusal(model_type, why):
            AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    for name, used in ((None, "hf_qknorm"), ("eager", "hf_qknorm_eager" if model_type == "qwen3" else "eager")):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
        assert loaded.config._attn_implementation == used


@pytest.mark.parametrize(
    ("name", "why"),
    [("hf_qknrom", "is unknown: did you mean 'hf_qknorm'?"), ("foo", "'foo' is unknown."), ("a/kernel", "can't cap")],
)
def test_a_backend_that_is_not_known(name, why):
    with refusal("llama", why):
        patch_model(sharp_model("llama"), CAPPED["cap"], attn_implementation=name)


@pytest.mark.parametrize(("model_type", "preset"), PAIRS)
def test_the_backend_follows_from_the_cap(model_type, preset):
    """A scheme with a cap sets its backend, one without keeps the model's, and an explicit backend has precedence."""
    scheme, own = SCHEMES[preset], sharp_model(model_type).config._attn_implementation
    for asked in (None, "eager", "hf_qknorm_tiled"):
        model = patch_model(sharp_model(model_type), scheme, attn_implementation=asked)
        assert model.config._attn_implementation == (asked or ("hf_qknorm" if scheme.softcap else own))


@pytest.mark.parametrize(
    ("model_type", "scheme", "backend"),
    covering(MODEL_TYPES, [None, *CAPPED], ["eager", "hf_qknorm_eager", "hf_qknorm"], strength=1),
)
@torch.no_grad()
def test_output_attentions(model_type, scheme, backend):
    chosen = SCHEMES["none"] if scheme is None else CAPPED[scheme]
    if not applies(model_type, chosen):
        chosen = CAPPED["cap"]
    model = patch_model(sharp_model(model_type), chosen, attn_implementation=backend)
    batch = make_batch("left")
    plain = model(**batch).logits
    result = model(**batch, output_attentions=True)
    assert_near(result.logits[real(batch)], plain[real(batch)], 0 if "eager" in backend else TOLERANCE)
    assert len(result.attentions) == 2
    for weights in result.attentions:
        assert weights.shape == (2, 4, LENGTH, LENGTH)
        rows = weights.transpose(1, 2)[real(batch)]  # [tokens, H, S]
        torch.testing.assert_close(rows.sum(-1), torch.ones(rows.shape[:-1]))
        assert (weights.triu(1).transpose(1, 2)[real(batch)] == 0).all()
        assert (weights[0, :, 6:, :6] == 0).all(), "padding gets no weight"


def test_output_attentions_where_there_are_no_weights_are_refused_with_advice():
    model = patch_model(sharp_model("gpt2"), CAPPED["cap"])
    for backend in ("hf_qknorm_tiled", "hf_qknorm_triton"):
        model.set_attn_implementation(backend)
        advice = rf"{backend}.*output_attentions.*set_attn_implementation\(.hf_qknorm_eager.\)"
        with pytest.raises(ValueError, match=advice):
            model(**make_batch("plain"), output_attentions=True)
    model = sharp_model("qwen3")  # its own forward
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions=True needs .* no cap: set it to False"):
        patch_model(model, "soft_cap")
    assert not isinstance(model, QKNormModel)


@pytest.mark.parametrize("model_type", ["bert", "gpt2", "llama"])
@torch.no_grad()
def test_weights_that_the_config_asks_for(model_type, tmp_path):
    """transformers accepts such a config with "eager" alone; capped layers compute the weights themselves."""
    batch = make_batch("plain", labels=False)
    model = sharp_model(model_type)
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    expected = model(**batch).attentions
    patch_model(model, Scheme(softcap=1e4)).save_pretrained(tmp_path)
    for patched in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert patched.config._attn_implementation == "eager"
        for weights, others in zip(patched(**batch).attentions, expected, strict=True):
            assert_near(weights, others, TOLERANCE)


@pytest.mark.skipif(Gemma2ForCausalLM._supports_sdpa, reason="older transformers drop Gemma 2's cap under sdpa")
def test_sdpa_never_drops_the_cap_of_gemma2():
    model = patch_model(sharp_model("gemma2"), "qk_norm")
    with pytest.raises(ValueError, match="sdpa|scaled_dot_product"):
        model.set_attn_implementation("sdpa")
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="softcap"):
        model(**make_batch("plain"))
