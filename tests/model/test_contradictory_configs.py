"""A config.json that contradicts itself, the weights or the family is refused with the setting's name."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from hf_qknorm import SCHEMES, Scheme, convert_checkpoint, patch_model
from hf_qknorm.inspection.inspect import inspect_checkpoint
from hf_qknorm.model.derived import derived_config, derived_model
from qknorm_tests.folders import edit_config
from qknorm_tests.tables import randomise, sharp_model
from qknorm_tests.tiny import TINY

PLAIN = Scheme(q="rms", k="rms", softcap=5.0)  # of the checkpoint that is edited
ROPE = {"rope_type": "default", "rope_theta": 1e4}

# Edits of the config.json of a Llama with norms and a cap, and the message of the refusal.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "base_model_type": ({"base_model_type": "mistral"}, "'base_model_type' is no setting"),
    "scheme": ({"scheme": {"softcap": 3.0}}, "'scheme' is no setting"),
    "another family's model_type": ({"model_type": "qknorm_mistral"}, "LlamaForCausalLM.* does not fit model_type"),
    "another family's class": ({"architectures": ["QKNormMistralForCausalLM"]}, "MistralForCausalLM.* does not fit"),
    "a preset's name": ({"qk_norm": "qk_norm_cap"}, "expected a scheme's fields, for 'qk_norm_cap' .*'softcap': 50.0"),
    "no scheme": ({"qk_norm": None}, 'needs "qk_norm"'),
    "an edited cap": ({"attn_logit_softcapping": 4.0}, "attn_logit_softcapping=4.0 contradicts"),
    "a base cap": ({"qk_norm_base": {"attn_logit_softcapping": 9.0}}, '"qk_norm_base" is .*9.0.*, expected null'),
    "an unknown field": ({"qk_norm": {**PLAIN.to_dict(), "knee": 0.0}}, "unknown scheme field 'knee'"),
    "no layers": ({"num_hidden_layers": 0}, "config.json: .* no layer has attention"),
    "no heads": ({"num_key_value_heads": 0}, "config.json can't be used"),
    "too many heads": ({"num_attention_heads": 2**62}, "config.json.*(num_attention_heads|attention heads)"),
    "heads in no groups": ({"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor of"),
    "a window of text": ({"sliding_window": "4"}, "config.json: sliding_window is '4', expected a whole number"),
    "a negative window": ({"sliding_window": -1}, "config.json: sliding_window is -1, expected a whole number"),
    "architectures": ({"architectures": 3}, "config.json.*architectures.*3"),
    "a part without a type": ({"text_config": {"x": 1}}, "config.json: text_config is .* expected no such setting"),
    "a dtype of whole numbers": ({"dtype": "int8"}, "config.json: dtype is torch.int8, expected the name of a"),
    "is_causal": ({"is_causal": "no"}, "config.json: is_causal is 'no', expected true or false"),
    "kinds of layers": ({"layer_types": ["full_attention"]}, "config.json can't be used.*num_hidden_layers"),
    "a size of another type": ({"hidden_size": "64"}, "config.json can't be used.*hidden_size' expected int, got str"),
    "rope_type": (
        {"rope_parameters": {"rope_type": "bogus", "rope_theta": 1e4}},
        "config.json.*can.* be (used|built).*bogus",
    ),
    "a rotation of more columns than a head has": (
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 40}},
        "config.json: rope_parameters.partial_rotary_factor is 40",
    ),
    "a negative rotation": ({"rope_parameters": {**ROPE, "partial_rotary_factor": -1}}, "partial_rotary_factor is -1"),
    "a rotation of text": ({"partial_rotary_factor": "1"}, "partial_rotary_factor is '1', expected a number from 0"),
    "a scheme without a field": (
        {"qk_norm": {name: value for name, value in PLAIN.to_dict().items() if name != "softcap"}},
        "\"qk_norm\" has no 'softcap', expected every field",
    ),
}


def edit(folder: Path, changes: dict[str, Any]) -> Path:
    return edit_config(folder, lambda config: config.update(changes))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    randomise(patch_model(sharp_model("llama"), PLAIN)).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, checkpoint):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(edit(checkpoint, changes))


def test_architectures_get_the_derived_class_name(checkpoint):
    """Servers select the class by `architectures`, which they read from this config."""
    edit(checkpoint, {"architectures": ["LlamaForCausalLM"]})
    assert AutoConfig.from_pretrained(checkpoint).architectures == ["QKNormLlamaForCausalLM"]
    AutoModelForCausalLM.from_pretrained(checkpoint).config.save_pretrained(checkpoint / "again")
    assert json.loads((checkpoint / "again/config.json").read_text())["architectures"] == ["QKNormLlamaForCausalLM"]


def test_a_family_with_its_own_cap_needs_qk_norm_base(tmp_path):
    patch_model(sharp_model("gemma2"), Scheme(softcap=20.0)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='"qk_norm_base" is None, expected .*the cap without a scheme'):
        AutoConfig.from_pretrained(edit(tmp_path, {"qk_norm_base": None}))


@pytest.mark.parametrize("scheme", ["soft_cap", SCHEMES["soft_cap"], {"softcap": 50.0}], ids=["name", "scheme", "part"])
def test_a_scheme_may_be_given_in_any_form_while_loading(scheme, checkpoint, tmp_path):
    """It replaces the file's scheme and cap; an unpatched checkpoint gets its first scheme."""
    config = AutoConfig.from_pretrained(checkpoint, qk_norm=scheme)
    assert config.scheme == SCHEMES["soft_cap"]
    assert config.attn_logit_softcapping == 50.0
    plain = sharp_model("llama")
    plain.save_pretrained(tmp_path / "plain")
    model = derived_model(type(plain)).from_pretrained(tmp_path / "plain", qk_norm=scheme)
    assert model.config.scheme == SCHEMES["soft_cap"]
    assert model.config.attn_logit_softcapping == 50.0
    assert derived_config("llama")(qk_norm=scheme).scheme == SCHEMES["soft_cap"]


def test_a_derived_class_takes_a_derived_config():
    model = patch_model(sharp_model("llama"), "soft_cap")
    with pytest.raises(TypeError, match="QKNormLlamaForCausalLM takes a QKNormLlamaConfig, got a LlamaConfig"):
        type(model)(LlamaConfig(**TINY))
    with pytest.raises(ValueError, match="config.json.*model_type 'qknorm_mistral'"):
        type(model)(derived_config("mistral")(qk_norm="soft_cap", **TINY))


@pytest.mark.parametrize(
    ("changes", "scheme"),
    [({"model_type": "mistral"}, "soft_cap"), ({"architectures": ["MistralForCausalLM"]}, "qk_norm")],
    ids=["model_type", "class"],
)
def test_a_conversion_patches_at_least_one_layer(changes, scheme, tmp_path):
    sharp_model("llama").save_pretrained(tmp_path / "source")
    edit(tmp_path / "source", changes)
    with pytest.raises(ValueError, match=r"config.json: .* has no \w+Attention to patch.*model_type.*architectures"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", scheme)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", ["a window of text", "a rotation of text", "architectures", "size"])
def test_a_plain_checkpoint_with_impossible_settings(case, tmp_path):
    sharp_model("llama").save_pretrained(tmp_path / "source")
    changes, message = ({"hidden_size": -1}, "hidden size .-1") if case == "size" else REFUSED[case]
    edit(tmp_path / "source", changes)
    (tmp_path / "text.txt").write_text("to be or not to be " * 40)
    with pytest.raises(ValueError, match=f"config.json.*{message.removeprefix('config.json')}"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", "soft_cap")
    with pytest.raises(ValueError, match=f"config.json.*{message.removeprefix('config.json')}"):
        inspect_checkpoint(str(tmp_path / "source"), data=str(tmp_path / "text.txt"))


def test_a_tensor_of_another_size_is_named(checkpoint):
    edit(checkpoint, {"intermediate_size": 32})
    with pytest.raises(
        RuntimeError, match="config.json asks for model.layers.0.mlp.down_proj.weight in shape .64, 32."
    ):
        AutoModelForCausalLM.from_pretrained(checkpoint)
    AutoModelForCausalLM.from_pretrained(checkpoint, ignore_mismatched_sizes=True)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("mistral", {}),  # has no such switch
        ("qwen2_moe", {"use_sliding_window": True}),
        ("qwen2_moe", {"use_sliding_window": False, "layer_types": ["full_attention", "sliding_attention"]}),
    ],
)
def test_a_window_of_0_is_refused_where_a_layer_slides(model_type, settings):
    """Qwen2-MoE's default is 0, where no layer slides."""
    plain = {"use_sliding_window": False, "layer_types": 2 * ["full_attention"], "sliding_window": 0}
    assert derived_config("qwen2_moe")(**TINY, **plain, qk_norm="soft_cap").sliding_window == 0
    with pytest.raises(ValueError, match="config.json: sliding_window is 0, expected a whole number ≥ 1, or null"):
        derived_config(model_type)(**{**TINY, "sliding_window": 0, **settings, "qk_norm": "soft_cap"})
