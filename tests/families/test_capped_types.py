"""A cap alone, on types that no family describes: their own forward runs, with hf_qknorm's attention function."""

from __future__ import annotations

import importlib
import pickle
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from hf_qknorm import (
    FAMILIES,
    SCHEMES,
    LogitMonitor,
    Scheme,
    add_standalone,
    logit_statistics,
    patch_model,
    unpatch_model,
)
from hf_qknorm.families import check_scheme
from hf_qknorm.families.style import FROM_5_24
from hf_qknorm.measure.bounds import logit_bounds
from hf_qknorm.model.attention import patched_layers
from qknorm_tests.children import child
from qknorm_tests.error_budget import error
from qknorm_tests.tables import assert_near, fingerprint
from qknorm_tests.tiny import TINY

CAP = 0.5
TOLERANCE = 1e-5
SMALL = {**TINY, "initializer_range": 0.3}

# The Auto class of each type, and its settings.
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dinov2": ("AutoModel", {**SMALL, "image_size": 16, "patch_size": 4}),
    "modernbert": ("AutoModelForMaskedLM", {**SMALL, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}),
    "t5": (
        "AutoModelForSeq2SeqLM",
        {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
        | {"relative_attention_max_distance": 16, "relative_attention_num_buckets": 8, "decoder_start_token_id": 0},
    ),
}
if FROM_5_24:
    TYPES |= {name: ("AutoModelForCausalLM", {**SMALL, "rotary_dim": 8, "n_ctx": 128}) for name in ("codegen", "gptj")}
TYPES = {name: case for name, case in TYPES.items() if name in CONFIG_MAPPING}
TEXT = [name for name, (auto, _) in TYPES.items() if auto != "AutoModel"]


def config_of(model_type: str) -> PretrainedConfig:
    config, settings = CONFIG_MAPPING[model_type], TYPES[model_type][1]
    return config(**{name: x for name, x in settings.items() if not isinstance(getattr(config, name, None), property)})


def made(model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return getattr(transformers, TYPES[model_type][0]).from_config(config_of(model_type)).eval()


def batch_for(model_type: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if model_type == "dinov2":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    tokens = torch.randint(3, 64, (2, 20), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, -6:] = 0
    decoder = {"decoder_input_ids": tokens[:, :9].contiguous()} if model_type == "t5" else {}
    return {"input_ids": tokens, "attention_mask": mask, **decoder}


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


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("backend", ["hf_qknorm", "hf_qknorm_tiled", "eager"])
def test_it_is_the_model_s_own_attention_with_a_cap(model_type, backend, monkeypatch):
    batch, model = batch_for(model_type), made(model_type)
    modelling = importlib.import_module(type(model).__module__)
    model.set_attn_implementation("eager")
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
@pytest.mark.parametrize("model_type", TYPES)
def test_none_and_observers_change_nothing(model_type):
    batch, model = batch_for(model_type), made(model_type)
    expected, backend = model(**batch)[0], model.config._attn_implementation
    patch_model(model, "none")
    assert torch.equal(model(**batch)[0], expected)
    with logit_statistics(model) as seen:
        assert torch.equal(model(**batch)[0], expected)
    assert seen.keys() == patched_layers(model).keys()
    assert all(entry.max_logit.max() > 0 for entry in seen.values())
    assert model.config._attn_implementation == backend
    with logit_statistics(unpatch_model(model)) as unpatched:
        model(**batch)
    assert {n: x.max_logit.tolist() for n, x in unpatched.items()} == {n: x.max_logit.tolist() for n, x in seen.items()}


@pytest.mark.parametrize("model_type", TYPES)
def test_a_training_step_is_sampled(model_type):
    model, monitor = patch_model(made(model_type), Scheme(softcap=CAP)).train(), LogitMonitor(every=1)
    with monitor.watch(model, 1):
        result(model, batch_for(model_type))
    assert list(monitor.last.layers) == list(patched_layers(model))
    assert all(layer.cap == CAP and min(layer.max_logit) > CAP for layer in monitor.last.layers.values())


@torch.no_grad()
@pytest.mark.parametrize("model_type", TYPES)
def test_it_saves_and_loads(model_type, tmp_path):
    batch, model = batch_for(model_type), patch_model(made(model_type), Scheme(softcap=CAP))
    assert set(logit_bounds(model).values()) == {None}
    expected = model(**batch)[0]
    assert torch.equal(pickle.loads(pickle.dumps(model))(**batch)[0], expected)
    model.save_pretrained(tmp_path)
    again = getattr(transformers, TYPES[model_type][0]).from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert type(again.config).model_type == f"qknorm_{model_type}"
    assert again.config.scheme == Scheme(softcap=CAP)
    assert torch.equal(again(**batch)[0], expected)


ALONE = """
import sys
sys.modules["hf_qknorm"] = None
import torch, transformers
from safetensors.torch import load_file
for name, auto in zip(sys.argv[1::2], sys.argv[2::2]):
    tensors = load_file(name + "/batch.safetensors")
    out = tensors.pop("out")
    model = getattr(transformers, auto).from_pretrained(name, trust_remote_code=True)
    with torch.no_grad():
        print(type(model).__module__.partition(".")[0], bool((model(**tensors)[0] - out).norm() < 1e-5 * out.norm()))
"""


@torch.no_grad()
def test_stand_alone_code_computes_the_same(tmp_path):
    arguments: list[str] = []
    for model_type, (auto, _) in TYPES.items():
        model, batch = patch_model(made(model_type), Scheme(softcap=CAP)), batch_for(model_type)
        model.save_pretrained(tmp_path / model_type)
        add_standalone(tmp_path / model_type)
        save_file(batch | {"out": model(**batch)[0].contiguous()}, tmp_path / model_type / "batch.safetensors")
        arguments += [str(tmp_path / model_type), auto]
    printed = child(ALONE, *arguments, home=tmp_path).splitlines()
    assert printed == ["transformers_modules True"] * len(TYPES)


@torch.no_grad()
@pytest.mark.parametrize("model_type", [name for name in TEXT if name != "modernbert"])
def test_a_cache_changes_nothing_in_a_generation(model_type):
    model, batch = patch_model(made(model_type), Scheme(softcap=CAP)), batch_for(model_type)
    inputs = {"input_ids": batch["input_ids"]}
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    found = [model.generate(**inputs, **settings, output_logits=True, use_cache=x) for x in (True, False)]
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert_near(torch.stack(found[0].logits), torch.stack(found[1].logits), TOLERANCE)


@pytest.mark.parametrize("model_type", ["qwen3", *TYPES])
@pytest.mark.parametrize("backend", ["sdpa", "flash_attention_2", "flex_attention"])
def test_a_backend_that_would_drop_the_cap_is_refused(model_type, backend):
    """A model's own forward passes no cap on; set behind our back, the first call refuses."""
    with torch.device("meta"):
        model = getattr(transformers, TYPES.get(model_type, ("AutoModelForCausalLM",))[0]).from_config(
            config_of(model_type) if model_type in TYPES else CONFIG_MAPPING[model_type](**TINY)
        )
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


@pytest.mark.parametrize("scheme", ["qk_norm", "qk_norm_cap", Scheme(scale=0.5)])
@pytest.mark.parametrize("model_type", TYPES)
def test_norms_and_a_scale_are_refused(model_type, scheme):
    model = made(model_type)
    before = fingerprint(model)
    message = f"model_type '{model_type}' is not supported: .* Only a cap can be added.* list all supported types"
    with pytest.raises(ValueError, match=message) as refusal:
        patch_model(model, scheme)
    assert fingerprint(model) == before
    assert sum(f"'{name}'" in str(refusal.value) for name in FAMILIES) <= 1, "the nearest name alone"


def test_a_type_that_caps_its_logits_itself_is_refused():
    with pytest.raises(ValueError, match="it caps its logits itself: set attn_logit_softcapping"):
        check_scheme("videoprism_text_model", None, SCHEMES["soft_cap"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_type_that_transformers_does_not_have_is_refused(scheme):
    class ForeignConfig(PretrainedConfig):
        model_type = "lama"

    class Foreign(PreTrainedModel):
        config_class = ForeignConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.layer = nn.Linear(2, 2)

    message = "model_type 'lama' is not supported: .*The nearest supported type is 'llama'"
    with pytest.raises(ValueError, match=message):
        patch_model(Foreign(ForeignConfig()), scheme)
