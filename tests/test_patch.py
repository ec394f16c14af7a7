"""`patch_model` and `unpatch_model`: in place, complete, reversible and logged; a patched model is copied and cast."""

import copy
import logging
import pickle
from inspect import signature

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.models.vit import ViTConfig, ViTModel

from hf_qknorm import FAMILIES, SCHEMES, Scheme, calibrate, patch_model, unpatch_model
from hf_qknorm.families.style import CACHE
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.install import as_unpatched
from hf_qknorm.model.norms import HeadNorm
from qknorm_tests.children import child
from qknorm_tests.tables import (
    KNEES,
    PAIRS,
    TRIED,
    assert_near,
    fingerprint,
    make_batch,
    randomise,
    sharp_model,
)  # fmt: skip
from qknorm_tests.tiny import TINY

every_model = pytest.mark.parametrize(("model_type", "preset"), [*PAIRS, *KNEES])


@every_model
@torch.no_grad()
def test_patching_is_in_place_and_complete_and_copies_compute_the_same(model_type, preset):
    scheme, base, model = TRIED[preset].resolve(), sharp_model(model_type), sharp_model(model_type)
    parameters, state = dict(model.named_parameters()), list(model.state_dict())
    assert patch_model(model, scheme) is model
    assert isinstance(model, type(base))
    assert len(patched_layers(model)) == 2
    assert sum(isinstance(module, HeadNorm) for module in model.modules()) == 2 * len(scheme.norms)
    assert {layer.scheme for layer in patched_layers(model).values()} == {scheme}
    after = dict(model.named_parameters())
    kept = [name for name in state if scheme.pre_norm or f".{FAMILIES[model_type].pre_norm}." not in f".{name}"]
    assert [name for name in model.state_dict() if "_norm." not in name or name in state] == kept
    assert all(after[name] is parameters[name] for name in kept if name in parameters)
    assert not model.training

    randomise(model)
    base.set_attn_implementation(model.config._attn_implementation)
    batch = make_batch("left")
    patched, expected = model(**batch).logits, base(**batch).logits
    before = fingerprint(model)
    with as_unpatched(model):
        assert_near(model(**batch).logits, expected, 0 if scheme.pre_norm else 2e-5)  # a fold rounds
    assert fingerprint(model) == before
    assert torch.equal(model(**batch).logits, patched)
    with pytest.raises(KeyError), as_unpatched(model):
        raise KeyError
    assert fingerprint(model) == before
    assert torch.equal(model(**batch).logits, patched)
    own_cap = getattr(base.config, "attn_logit_softcapping", None)
    unchanged = scheme in (Scheme(), Scheme(softcap=own_cap))
    assert torch.equal(patched, expected) == unchanged
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert (type(copied), str(copied)) == (type(model), str(model))
        assert torch.equal(copied(**batch).logits, patched)
    if scheme.pre_norm:
        unpatch_model(copied)
        assert not patched_layers(copied)
    assert len(patched_layers(model)) == 2


@pytest.mark.slow
def test_a_pickle_loads_in_a_new_process(tmp_path):
    models = [randomise(patch_model(sharp_model(model_type), "soft_cap")) for model_type in ("gpt2", "llama")]
    batch = make_batch("left", labels=False)
    with torch.no_grad():
        logits = [model(**batch).logits for model in models]
    (tmp_path / "models.pickle").write_bytes(pickle.dumps((models, batch, logits)))
    script = (
        "import pickle, sys, torch; torch.set_num_threads(1)\n"
        "models, batch, logits = pickle.load(open(sys.argv[1], 'rb'))\n"
        "sys.exit(not all(torch.equal(m(**batch).logits, x) for m, x in zip(models, logits, strict=True)))"
    )
    child(script, tmp_path / "models.pickle", home=tmp_path)


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "phi3"])
@torch.no_grad()
def test_new_parameters_take_the_models_dtype(model_type):
    scheme = Scheme(q="rms", k="rms", gain="per_head", bias=True)
    model = patch_model(sharp_model(model_type).to(torch.bfloat16), scheme)
    added = [p for module in model.modules() if isinstance(module, HeadNorm) for p in module.parameters()]
    assert len(added) == 8
    assert all(p.dtype == torch.bfloat16 for p in added)
    assert model(**make_batch("left")).logits.dtype == torch.bfloat16


@torch.no_grad()
def test_a_removed_norm_follows_the_model_to_another_dtype():
    model, base = randomise(patch_model(sharp_model("llama"), "qkv_norm")), sharp_model("llama")
    model.to(torch.bfloat16)
    with as_unpatched(model):
        logits = model(**make_batch("left")).logits
    assert logits.dtype == torch.bfloat16
    assert_near(logits, base(**make_batch("left")).logits, 0.05)


@every_model
def test_under_autocast_q_and_k_reach_the_attention_in_the_dtype_of_v(model_type, preset):
    model = randomise(patch_model(sharp_model(model_type), TRIED[preset]))
    seen = []
    for layer in patched_layers(model).values():
        layer.observers = (lambda module, q, k, v, *rest: seen.append((q.dtype, k.dtype, v.dtype)),)
    with torch.autocast("cpu", torch.bfloat16):
        result = model(**make_batch("left"), use_cache=True)
    result.loss.backward()
    if not FAMILIES[model_type].own_norms:  # whose own forward may promote them: the attention function casts
        assert seen == [(torch.bfloat16,) * 3] * 2
        assert all(layer.keys.dtype == layer.values.dtype for layer in result[CACHE].layers)
    assert all(p.grad.isfinite().all() for p in model.parameters())


PER_HEAD = (Scheme(q="rms", k="rms", gain="per_head", bias=True), Scheme(q="layer", v="l2", gain="per_head"))


def head_norms(model: torch.nn.Module) -> list[HeadNorm]:
    return [module for module in model.modules() if isinstance(module, HeadNorm)]


@pytest.mark.parametrize("scheme", [*PER_HEAD, SCHEMES["henry"]], ids=str)
def test_names_of_the_new_parameters_keep_them_from_weight_decay(scheme, tmp_path):
    model = sharp_model("llama")
    before = set(model.state_dict())
    patch_model(model, scheme)
    added = set(model.state_dict()) - before
    assert all(name.endswith(("_norm.weight", "_norm.bias", "_norm.knee")) for name in added)
    trainer = Trainer(model, TrainingArguments(tmp_path, use_cpu=True, report_to=[]))
    decayed = trainer.get_decay_parameter_names(model)
    assert not added & set(decayed)
    assert decayed, "projections decay as before"


def test_a_model_is_patched_on_its_device_in_the_context_of_another():
    model = sharp_model("llama")
    with torch.device("meta"):
        patch_model(model, "qk_norm")
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


def test_gains_made_in_inference_mode_train():
    model = sharp_model("llama")
    with torch.inference_mode():
        calibrate(patch_model(model, "qk_norm"), [make_batch("none", labels=False)], knee=4.0)
    model.train()(**make_batch("none")).loss.backward()
    assert all(norm.weight.grad.any() for norm in head_norms(model))


@pytest.mark.parametrize("scheme", ["soft_cap", "qk_norm"])
def test_the_constructor_of_a_patched_class_states_the_parameters_of_the_models_own(scheme, tmp_path):
    """A loader asks it whether to pass `use_mask_token`, which is in no config."""
    config = ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, image_size=16)
    base = ViTModel(config, use_mask_token=True)
    parameters = signature(base.__init__)
    model = patch_model(base, scheme)
    assert signature(model.__init__) == parameters
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, use_mask_token=True)
    assert torch.equal(loaded.embeddings.mask_token, model.embeddings.mask_token)


def test_models_that_share_a_config_are_patched_separately():
    config = LlamaConfig(**TINY)
    first, second = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    assert first.config is second.config
    before, expected = fingerprint(second), second(**make_batch("left")).logits
    patch_model(first)
    assert fingerprint(second) == before
    assert torch.equal(second(**make_batch("left")).logits, expected)
    assert type(config) is LlamaConfig
    assert not hasattr(config, "qk_norm")
    patch_model(second, "soft_cap")
    assert first.config.scheme != second.config.scheme
    unpatch_model(first)
    assert len(patched_layers(second)) == 2


def test_print_shows_the_norms_the_scale_and_the_cap():
    text = str(patch_model(sharp_model("llama"), Scheme(q="rms", k="lp", p=3, gain="per_head", softcap=30)))
    assert "QKNormLlamaAttention" in text
    assert "scale=0.25, softcap=30" in text
    assert "(q_norm): HeadNorm(rms, gain=[4, 16], bias=False, eps=1e-06)" in text
    assert "(k_norm): HeadNorm(lp, p=3, gain=[2, 16], bias=False, eps=1e-06)" in text
    henry = str(patch_model(sharp_model("gpt2"), "henry"))
    assert "scale=1" in henry
    assert "softcap" not in henry
    assert "(q_norm): HeadNorm(l2, gain=[1], bias=False, eps=1e-06)" in henry
    assert "(k_norm): HeadNorm(l2, gain=none" in henry
    assert "softcap=50" in str(patch_model(sharp_model("gemma2"), "none")), "its own cap is shown as well"


def of_package(caplog):
    """The records of patching, without those of the attention function's first call."""
    return [record for record in caplog.records if record.message.startswith("patched")]


def test_fresh_gains_on_a_trained_model_are_logged_as_a_warning(caplog, tmp_path):
    sharp_model("llama").save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger="hf_qknorm"):
        patch_model(AutoModelForCausalLM.from_pretrained(tmp_path), "qk_norm")
        patch_model(AutoModelForCausalLM.from_pretrained(tmp_path), "soft_cap")
    normed, capped = of_package(caplog)
    assert normed.levelname == "WARNING"
    assert "its gains are fresh" in normed.message
    assert "calibrate(model, texts)" in normed.message
    assert capped.levelname == "INFO"


@pytest.mark.parametrize("preset", ["qk_norm", "qkv_norm", "henry"])
def test_a_reloaded_model_is_unpatched_where_that_is_possible(preset, tmp_path):
    base = sharp_model("llama")
    expected = base(**make_batch("left")).logits
    randomise(patch_model(base, preset)).save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    if preset == "qkv_norm":
        before = fingerprint(reloaded)
        with pytest.raises(ValueError, match="can't be undone"):
            unpatch_model(reloaded)
        with pytest.raises(ValueError, match="not known any more"), as_unpatched(reloaded):
            pass
        assert fingerprint(reloaded) == before
        return
    unpatch_model(reloaded)
    assert type(reloaded) is LlamaForCausalLM
    assert reloaded.config.model_type == "llama"
    assert reloaded.config.architectures == ["LlamaForCausalLM"]
    assert reloaded.config._attn_implementation == "sdpa"
    assert torch.equal(reloaded(**make_batch("left")).logits, expected)


@pytest.mark.parametrize("scheme", ["none", "qk_norm_cap"])
def test_an_unpatched_model_keeps_a_backend_of_the_package(scheme):
    model = sharp_model("llama")
    model.set_attn_implementation("hf_qknorm_tiled")
    assert unpatch_model(patch_model(model, scheme)).config._attn_implementation == "hf_qknorm_tiled"
