"""transformers' own classes refuse a patched checkpoint, with the package imported or not installed."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, EncoderDecoderModel, LlavaForConditionalGeneration
from transformers.models.llama import LlamaConfig, LlamaForCausalLM, LlamaModel

from hf_qknorm import Scheme, patch_model, unpatch_model
from hf_qknorm.model import derived
from hf_qknorm.model.load_checks import UnpatchedClassError
from hf_qknorm.standalone.notice import NOTICES
from qknorm_tests.children import child
from qknorm_tests.folders import edit, save
from qknorm_tests.tables import randomise, sharp_model
from qknorm_tests.tiny import tiny_config
from qknorm_tests.tiny_towers import tiny_towers

NORMED = Scheme(q="rms", k="rms", softcap=5.0)
WAYS = {
    "model": lambda folder: LlamaForCausalLM.from_pretrained(folder),
    "model with a backend": lambda folder: LlamaForCausalLM.from_pretrained(folder, attn_implementation="sdpa"),
    "body": lambda folder: LlamaModel.from_pretrained(folder),
    "config": lambda folder: LlamaConfig.from_pretrained(folder),
    "config as data": lambda folder: LlamaConfig(**json.loads((folder / "config.json").read_text())),
    "Auto class and a plain config": lambda folder: AutoModel.from_pretrained(folder, config=tiny_config("llama")),
    "plain class and its own config": lambda folder: LlamaForCausalLM.from_pretrained(
        folder, config=AutoConfig.from_pretrained(folder)
    ),
}
WITHOUT_PACKAGE = """
import sys
sys.modules["hf_qknorm"] = None
import transformers
for folder in sys.argv[1:]:
    name = folder.rpartition("/")[2]
    try:
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    except ValueError as error:
        print(f"`qknorm_{name}` but Transformers does not recognize this architecture" in str(error))
    for auto in ("AutoModelForCausalLM", "AutoModel"):
        plain = getattr(transformers, auto)._model_mapping[transformers.CONFIG_MAPPING[name]]
        for options in ({}, {"attn_implementation": "eager"}, {"experts_implementation": "eager"}):
            try:
                plain.from_pretrained(folder, **options)
            except ValueError as error:
                print("qk_norm: load it after `import hf_qknorm`" in str(error))
            else:
                print("loaded", name, plain)
"""


@pytest.fixture(scope="module", params=[NORMED, Scheme(softcap=5.0)], ids=["normed", "capped"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(randomise(patch_model(sharp_model("llama"), request.param)), tmp_path_factory.mktemp("patched"))


@pytest.mark.parametrize("way", WAYS)
def test_with_the_package(way, folder):
    with pytest.raises(ValueError, match="is a patched checkpoint of model_type 'qknorm_llama', and Llama"):
        WAYS[way](folder)


@pytest.mark.parametrize("way", ["folder", "base model", "state dict"])
def test_patched_weights_under_the_config_of_an_unpatched_model(way, tmp_path):
    model, config = patch_model(sharp_model("llama"), NORMED), sharp_model("llama").config
    model.save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    cls, source, weights = LlamaForCausalLM, tmp_path, None
    if way == "state dict":
        source, weights = None, model.state_dict()
    elif way == "base model":
        cls = LlamaModel
    with pytest.raises(ValueError, match=r"k_norm\.knee is the weight of a norm that a Llama.* Restore the config"):
        cls.from_pretrained(source, config=config, state_dict=weights)


@pytest.mark.costly
def test_without_the_package(tmp_path):
    """Read as its base type, the model would load without its norms and without an error."""
    model_types = ("gpt2", "llama", "mixtral")
    for model_type in model_types:
        patch_model(sharp_model(model_type), "soft_cap").save_pretrained(tmp_path / model_type)
    printed = child(WITHOUT_PACKAGE, *(tmp_path / model_type for model_type in model_types), home=tmp_path / "home")
    assert printed.split("\n") == ["True"] * (len(model_types) * (1 + 2 * 3)) + [""]


def test_a_requested_backend_replaces_the_notice(folder):
    assert AutoModelForCausalLM.from_pretrained(folder).config._attn_implementation == "hf_qknorm"
    for backend in ("hf_qknorm_eager", "hf_qknorm_tiled"):
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=backend)
        assert model.config._attn_implementation == backend
    assert not set(NOTICES) & set(vars(model.config))


# A tensor of a norm, its change, and the end of the refusal.
DAMAGE = {
    "impossible": ("knee", lambda x: x + math.nan, r"' is \[nan, nan, nan\], expected three finite numbers"),
    "no gain": ("weight", None, "'"),
    "no knee": ("knee", None, "'"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_patched_tower_is_checked_too(damage, tmp_path):
    kind, change, message = DAMAGE[damage]
    randomise(patch_model(tiny_towers("llava"), NORMED)).save_pretrained(tmp_path)
    assert LlavaForConditionalGeneration.from_pretrained(tmp_path) is not None

    def harm(weights: dict[str, torch.Tensor]) -> None:
        name = max(name for name in weights if name.endswith(f"q_norm.{kind}"))
        value = weights.pop(name)
        weights.update({name: change(value)} if change else {})

    edit(tmp_path, harm)
    with pytest.raises(ValueError, match=rf"q_norm\.{kind}{message}"):
        LlavaForConditionalGeneration.from_pretrained(tmp_path)


def encoder_decoder() -> EncoderDecoderModel:
    """A whole that patch_model refuses, whose decoder has cross-attention."""
    encoder = AutoModel.from_config(tiny_config("bert", is_decoder=False))
    decoder = AutoModelForCausalLM.from_config(tiny_config("bert", is_decoder=True, add_cross_attention=True))
    return EncoderDecoderModel(encoder=encoder, decoder=decoder)


PARTS = {
    "model": lambda: sharp_model("llama"),
    "model.language_model": lambda: tiny_towers("llava"),
    "encoder": encoder_decoder,
}


@pytest.mark.parametrize("scheme", ["qk_norm", "soft_cap"])
@pytest.mark.parametrize("part", PARTS)
def test_the_whole_of_a_patched_part_is_not_saved(part, scheme, tmp_path):
    model = PARTS[part]()
    inner = patch_model(model.get_submodule(part), scheme)
    found = rf"is patched.* config does not hold its scheme.* as model\.{part}\.save_.* unpatch_model\(model\.{part}\)"
    with pytest.raises(ValueError, match=found):
        model.save_pretrained(tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    inner.save_pretrained(tmp_path / "part")
    assert type(AutoModel.from_pretrained(tmp_path / "part")) is type(inner)
    patch_model(inner := unpatch_model(inner), "none")
    model.save_pretrained(tmp_path / "none")


@pytest.mark.parametrize("scheme", ["qk_norm", "soft_cap"])
@pytest.mark.parametrize("part", ["model", "model.language_model"])
def test_the_whole_of_an_unpatched_part_is_not_saved(part, scheme, tmp_path):
    model = patch_model(PARTS[part](), scheme)
    inner = unpatch_model(model.get_submodule(part))
    with pytest.raises(ValueError, match=r"config holds a scheme \(.*\) that no layer has"):
        model.save_pretrained(tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    if part == "model":
        unpatch_model(model)
    else:
        model.config.text_config = inner.config
    model.save_pretrained(tmp_path / "whole")
    assert type(type(model).from_pretrained(tmp_path / "whole").get_submodule(part)) is type(inner)


@pytest.mark.parametrize("scheme", ["qk_norm", "soft_cap"])
def test_a_model_with_an_unpatched_layer_is_not_saved(scheme, tmp_path):
    model = patch_model(sharp_model("llama"), scheme)
    model.model.layers[1] = sharp_model("llama").model.layers[1]
    with pytest.raises(ValueError, match=r"config holds a scheme \(.*\) that model\.layers\.1\.self_attn lacks"):
        model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_scheme_that_was_changed_in_the_config_alone_is_not_saved(tmp_path):
    model = patch_model(sharp_model("llama"), "soft_cap")
    model.config.set_scheme(Scheme(softcap=30.0))
    with pytest.raises(ValueError, match=r"config does not hold its scheme \(softcap=50.0\)"):
        model.save_pretrained(tmp_path)
    assert not [*tmp_path.iterdir()]


class LlamaWithValue(LlamaForCausalLM):
    """A class of a user's own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.value = nn.Linear(config.hidden_size, 1)
        self.post_init()


def test_a_class_of_the_user_s_own_is_loaded_by_its_derived_class(tmp_path):
    model = patch_model(LlamaWithValue(tiny_config("llama")), "qk_norm_cap")
    model.save_pretrained(tmp_path)
    with pytest.raises(UnpatchedClassError, match="hf_qknorm.model.derived: QKNormNAME for a class NAME, your own"):
        LlamaWithValue.from_pretrained(tmp_path)
    again = derived.QKNormLlamaWithValue.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert torch.equal(again.value.weight, model.value.weight)
