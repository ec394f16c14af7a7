"""A cap alone, on types that no family describes: their own forward runs, with hf_qknorm's attention function."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from hf_qknorm import FAMILIES, SCHEMES, Scheme, logit_statistics, patch_model, unpatch_model
from hf_qknorm.families import check_scheme
from hf_qknorm.measure.bounds import norm_limits
from hf_qknorm.model.attention import patched_layers
from qknorm_tests.covering import covering
from qknorm_tests.error_budget import error
from qknorm_tests.tables import assert_near, fingerprint, make_batch, sharp_model
from qknorm_tests.tiny import tiny_model
from qknorm_tests.vision_cases import CAPPED, made, unlabelled

IN_TABLE = ("llama", "qwen3")  # with the shared forward, and with the model's own
CAP = 0.5
TOLERANCE = 1e-5


def result(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The first output at real tokens, and all gradients of its mean square."""
    model.zero_grad()
    out = model(**batch)[0]
    if "attention_mask" in batch and out.shape[:2] == batch["attention_mask"].shape:
        out = out[batch["attention_mask"].bool()]
    out.square().mean().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def capped_eager(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None = None,
    position_bias: Any = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Eager attention with a cap on q·k, before bias and mask."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = CAP * torch.tanh(q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling) / CAP)
    for added in (mask, position_bias):
        logits = logits if added is None else logits + added
    weights = logits.softmax(-1)
    return (weights @ v).transpose(1, 2).contiguous(), weights


@pytest.mark.parametrize(
    ("model_type", "backend"),
    covering([*CAPPED, *IN_TABLE], ["hf_qknorm", "hf_qknorm_tiled", "eager", "hf_qknorm_eager"], strength=1),
)
def test_it_is_the_model_s_own_attention_with_a_cap(model_type, backend, monkeypatch):
    batch = make_batch("right", labels=False) if model_type in IN_TABLE else unlabelled(model_type)
    model = sharp_model(model_type) if model_type in IN_TABLE else made(model_type)
    modelling = importlib.import_module(type(model).__module__)
    for part in model.modules():  # set_attn_implementation of transformers 5.17 leaves out T5's encoder and decoder
        if hasattr(part, "config"):
            part.config._attn_implementation = "eager"
    plain = model(**batch)[0].detach()
    with monkeypatch.context() as patch:
        patch.setattr(modelling, "eager_attention_forward", capped_eager)
        expected, gradient = result(model, batch)
    before = fingerprint(model)
    patch_model(model, Scheme(softcap=CAP), attn_implementation=backend)
    out, found = result(model, batch)
    assert_near(out, expected, TOLERANCE)
    assert_near(found, gradient, TOLERANCE, "gradients")
    with torch.no_grad():
        assert error(model(**batch)[0], plain) > 100 * TOLERANCE, "the cap acts"
        assert fingerprint(unpatch_model(model)) == before
        assert torch.equal(model(**batch)[0], plain)


@torch.no_grad()
@pytest.mark.parametrize("model_type", CAPPED)
def test_none_and_observers_change_nothing(model_type):
    batch, model = unlabelled(model_type), made(model_type)
    expected, backend = model(**batch)[0], model.config._attn_implementation
    patch_model(model, "none")
    assert torch.equal(model(**batch)[0], expected)
    with logit_statistics(model) as seen:
        assert torch.equal(model(**batch)[0], expected)
    assert seen.keys() == patched_layers(model).keys()
    assert all(entry.max_logit.max() > 0 for entry in seen.values())
    assert model.config._attn_implementation == backend
    assert {limits["bound"] for limits in norm_limits(model).values()} == {None}
    with logit_statistics(unpatch_model(model)) as unpatched:
        model(**batch)
    assert {n: x.max_logit.tolist() for n, x in unpatched.items()} == {n: x.max_logit.tolist() for n, x in seen.items()}


@pytest.mark.parametrize(
    ("model_type", "backend"), covering(["qwen3", *CAPPED], ["sdpa", "flash_attention_2", "flex_attention"], strength=1)
)
def test_a_backend_that_would_drop_the_cap_is_refused(model_type, backend):
    """A model's own forward passes no cap on; set behind our back, the first call refuses."""
    with torch.device("meta"):
        model = made(model_type) if model_type in CAPPED else tiny_model(model_type)
    before = fingerprint(model)
    with pytest.raises(ValueError, match=rf"{backend}' can't cap attention logits \(softcap=50\)"):
        patch_model(model, "soft_cap", attn_implementation=backend)
    assert fingerprint(model) == before
    layer: Any = next(iter(patched_layers(patch_model(model, "soft_cap")).values()))
    layer.config._attn_implementation_internal = backend
    with pytest.raises(ValueError, match="can't cap attention logits"):
        layer(torch.zeros(1, 2, 64, device="meta"))


def test_cross_attention_is_capped_too():
    assert len(patched_layers(patch_model(made("t5"), "soft_cap"))) == 6, "two of the encoder, twice two of the decoder"


@pytest.mark.parametrize(
    ("model_type", "scheme"), covering(CAPPED, ["qk_norm", "qk_norm_cap", Scheme(scale=0.5)], strength=1), ids=str
)
def test_norms_and_a_scale_are_refused(model_type, scheme):
    model = made(model_type)
    before = fingerprint(model)
    message = f"model_type '{model_type}' is not supported: .* Only a cap can be added.* how to add one"
    with pytest.raises(ValueError, match=message) as refusal:
        patch_model(model, scheme)
    assert fingerprint(model) == before
    assert sum(f"'{name}'" in str(refusal.value) for name in FAMILIES) <= 1, "the nearest name alone"


def test_a_type_that_caps_its_logits_itself_is_refused():
    with pytest.raises(ValueError, match="it caps its logits itself: set attn_logit_softcapping"):
        check_scheme("videoprism_text_model", None, SCHEMES["soft_cap"])


@pytest.mark.parametrize("scheme", ["none", "soft_cap", "qk_norm"])
def test_a_type_that_transformers_does_not_have_is_refused(scheme):
    foreign = type("ForeignConfig", (PretrainedConfig,), {"model_type": "lama"})
    model = type("Foreign", (PreTrainedModel,), {"config_class": foreign})(foreign())
    with pytest.raises(ValueError, match="model_type 'lama' is not supported: .*The nearest supported type is 'llama'"):
        patch_model(model, scheme)
