"""A saved model loads unchanged through every Auto class and way of loading."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from hf_qknorm import FAMILIES, SCHEMES, Scheme, calibrate, patch_model
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.derived import derived_config
from hf_qknorm.model.norms import HeadNorm
from qknorm_tests.covering import covering
from qknorm_tests.folders import save
from qknorm_tests.tables import MODEL_TYPES, applies, make_batch, randomise, sharp_model
from qknorm_tests.tiny import tiny_settings

SAVED = {
    **{name: SCHEMES[name] for name in ("soft_cap", "qk_norm_cap", "qkv_norm", "henry", "lp")},
    "per head": Scheme(q="rms", k="layer", v="l2", gain="per_head", bias=True, eps=1e-5, scale=0.3),
}
MODELS = [
    *covering(MODEL_TYPES, SAVED, fits=lambda model_type, name: applies(model_type, SAVED[name]), strength=1),
    *(("gpt2", "qkv_norm"), ("llama", "per head")),
]
LOADING = {
    "plain": {},
    "device map": {"device_map": "cpu"},
    "device dict": {"device_map": {"": "cpu"}},
    "low memory": {"low_cpu_mem_usage": True},
    "sequential": {"device_map": "sequential"},
}


def patched(model_type: str, scheme: str, **settings: object) -> PreTrainedModel:
    return randomise(patch_model(sharp_model(model_type, **settings), SAVED[scheme]))


def keys(folder: Path) -> set[str]:
    return {key for file in folder.glob("*.safetensors") for key in safe_open(file, "pt").keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    """A patched model with random gains, and the folder that it was saved to."""
    model = patched(*request.param)
    return model, save(model, tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize(("saved", "loading"), covering(MODELS, LOADING, strength=1), indirect=["saved"])
@torch.no_grad()
def test_round_trip(saved, loading):
    model, folder = saved
    reloaded = AutoModelForCausalLM.from_pretrained(folder, **LOADING[loading])
    assert type(reloaded) is type(model)
    assert reloaded.config.scheme == model.config.scheme
    assert reloaded.config._attn_implementation == model.config._attn_implementation
    assert torch.equal(reloaded(**make_batch("left")).logits, model(**make_batch("left")).logits)

    config = json.loads((folder / "config.json").read_text())
    assert config["qk_norm"] == model.config.scheme.to_dict()
    assert "auto" not in config["qk_norm"].values()
    assert config["model_type"] == f"qknorm_{model.config.base_model_type}"
    assert config["architectures"] == [type(model).__name__]
    assert config["architectures"][0].startswith("QKNorm")
    own = 50.0 if FAMILIES[model.config.base_model_type].own_cap else None
    assert config["attn_logit_softcapping"] == (model.config.scheme.softcap or own)
    again = AutoConfig.from_pretrained(folder)
    assert type(again) is type(model.config)
    assert again.to_dict() == {**model.config.to_dict(), "_name_or_path": str(folder)}
    again.save_pretrained(folder / "again")
    assert json.loads((folder / "again" / "config.json").read_text()) == config


@pytest.mark.parametrize(("model_type", "tied"), covering(MODEL_TYPES, [False, True], strength=1))
@torch.no_grad()
def test_the_names_in_the_file_are_the_base_models_and_the_gains(model_type, tied, tmp_path):
    """Also when the model was loaded first: transformers remembers how it renamed weights, and renames them back."""
    sharp_model(model_type, tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    scheme = "per head" if applies(model_type, SAVED["per head"]) else "soft_cap"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    randomise(patch_model(model, SAVED[scheme])).save_pretrained(tmp_path / "loaded")
    patched(model_type, scheme, tie_word_embeddings=tied).save_pretrained(tmp_path / "scratch")
    assert keys(tmp_path / "loaded") == keys(tmp_path / "scratch")
    added = keys(tmp_path / "loaded") - keys(tmp_path / "base")
    assert len(added) == sum(len(m.state_dict()) for m in model.modules() if isinstance(m, HeadNorm))
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "loaded")
    assert (reloaded.get_output_embeddings().weight is reloaded.get_input_embeddings().weight) == tied
    assert torch.equal(reloaded(**make_batch("left")).logits, model(**make_batch("left")).logits)


@pytest.mark.parametrize("saved", MODELS[::2], indirect=True)
@torch.no_grad()
def test_the_body_of_a_causal_model(saved, tmp_path):
    """`AutoModel` and the classifiers load its layers and gains, and it loads theirs."""
    model, folder = saved
    batch = make_batch("right", labels=False)
    expected = model.base_model(**batch).last_hidden_state
    body = AutoModel.from_pretrained(folder)
    assert torch.equal(body(**batch).last_hidden_state, expected)
    for head in ("SequenceClassification", "TokenClassification"):
        classifier = getattr(transformers, f"AutoModelFor{head}").from_pretrained(folder, num_labels=3)
        assert len(patched_layers(classifier)) == 2
        assert torch.equal(classifier.base_model(**batch).last_hidden_state, expected)
    body.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).base_model(**batch).last_hidden_state, expected)


@pytest.mark.parametrize(("model_type", "scheme"), MODELS)
@torch.no_grad()
def test_from_scratch(model_type, scheme):
    """A derived config builds the same model as patching the base config's model."""
    settings = {**tiny_settings(model_type), "initializer_range": 0.2}
    built = derived_config(model_type)(qk_norm=SAVED[scheme], **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(built).eval()
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[model_type](**settings)).eval()
    expected = patch_model(base, SAVED[scheme])
    assert type(model) is type(expected)
    assert str(model) == str(expected)
    assert model.config.scheme == expected.config.scheme
    assert model.config._attn_implementation == expected.config._attn_implementation
    if not SAVED[scheme].pre_norm and FAMILIES[model_type].norm == "layer":
        return  # folding a LayerNorm centres weights, which a fresh model draws as they come
    assert torch.equal(model(**make_batch("left")).logits, expected(**make_batch("left")).logits)


@torch.no_grad()
def test_a_norm_whose_inputs_are_all_zero_is_calibrated_saved_and_loaded(tmp_path):
    """The queries of dead heads have a mean square of 0."""
    model = sharp_model("llama")
    model.model.layers[0].self_attn.q_proj.weight.zero_()
    batch = make_batch("plain", labels=False)
    calibrate(patch_model(model, "qk_norm"), [batch] * 2, knee=4.0)
    expected = model(**batch).logits
    assert expected.isfinite().all()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(**batch).logits, expected)
    again.model.layers[0].self_attn.q_proj.weight.normal_()
    assert again(**batch).logits.isfinite().all()
