"""The name of a model that was changed in memory: models are refused for it, tokenizers and cards get a string."""

import copy
import json
import pickle
import sys
from importlib import import_module

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, LlavaForConditionalGeneration

from hf_qknorm import calibrate, patch_model, unpatch_model
from hf_qknorm.small_model import byte_tokenizer
from qknorm_tests.tables import make_batch, randomise, sharp_model
from qknorm_tests.tiny_towers import tiny_towers


@pytest.fixture
def folder(tmp_path):
    """An unpatched checkpoint."""
    sharp_model("llama").save_pretrained(tmp_path / "unpatched")
    return tmp_path / "unpatched"


@pytest.fixture
def patched(folder):
    return randomise(patch_model(AutoModelForCausalLM.from_pretrained(folder), "qk_norm_cap"))


def calibrated(folder):
    calibrate(model := AutoModelForCausalLM.from_pretrained(folder), [make_batch("plain", labels=False)], knee=0)
    return model


CHANGES = {"calibrated": calibrated, "unpatched": lambda folder: unpatch_model(calibrated(folder))}


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, LlamaForCausalLM])
def test_a_model_is_refused(auto, patched, folder):
    for name in (patched.name_or_path, patched.config.name_or_path, copy.deepcopy(patched).name_or_path):
        with pytest.raises(OSError, match=r"'\S+/unpatched' of a model that was changed in memory.* as ref_model="):
            auto.from_pretrained(pretrained_model_name_or_path=name)
    assert type(auto.from_pretrained(str(patched.name_or_path))) is LlamaForCausalLM
    unpatch_model(patched)
    assert type(patched.name_or_path) is type(patched.config.name_or_path) is str
    assert patched.name_or_path == str(folder)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_to_a_patched_checkpoint_are_marked(change, patched, tmp_path):
    patched.save_pretrained(tmp_path / "out")
    model = CHANGES[change](tmp_path / "out")
    with pytest.raises(OSError, match="changed in memory"):
        AutoModelForCausalLM.from_pretrained(model.name_or_path)


def test_a_model_with_a_patched_tower_is_refused(tmp_path):
    tiny_towers("llava").save_pretrained(tmp_path)
    model = patch_model(LlavaForConditionalGeneration.from_pretrained(tmp_path), "qk_norm_cap")
    with pytest.raises(OSError, match="changed in memory"):
        LlavaForConditionalGeneration.from_pretrained(model.name_or_path)
    assert type(unpatch_model(model).name_or_path) is str


def test_anywhere_else_the_name_is_a_string(patched, folder, tmp_path):
    byte_tokenizer().save_pretrained(folder)
    name = patched.name_or_path
    assert AutoTokenizer.from_pretrained(name).get_vocab() == byte_tokenizer().get_vocab()
    assert pickle.loads(pickle.dumps(name)) == str(folder)
    assert yaml.safe_load(yaml.dump({"base_model": name})) == json.loads(json.dumps({"base_model": name}))
    for dumper in (yaml.SafeDumper, yaml.CDumper, yaml.CSafeDumper):
        assert yaml.safe_load(yaml.dump([name], Dumper=dumper)) == [str(folder)]
    patched.save_pretrained(tmp_path / "out")
    assert str(folder) not in (tmp_path / "out" / "config.json").read_text()
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "out").name_or_path) is str


VLLM = """
class LLM:
    def __init__(self, model, *, seed=0):
        self.loaded = model, seed
"""


@pytest.mark.skipif("vllm" in sys.modules, reason="vLLM itself is imported")
def test_vllm_gets_no_name_of_a_model_in_memory(patched, folder, tmp_path, monkeypatch):
    """Against its constructor's signature, as vLLM does not run here."""
    (tmp_path / "vllm" / "entrypoints").mkdir(parents=True)
    (tmp_path / "vllm" / "entrypoints" / "llm.py").write_text(VLLM)
    monkeypatch.syspath_prepend(tmp_path)
    llm = import_module("vllm.entrypoints.llm").LLM
    for name in ("vllm.entrypoints.llm", "vllm.entrypoints", "vllm"):
        del sys.modules[name]
    for call in (lambda: llm(patched.name_or_path), lambda: llm(model=patched.name_or_path, seed=1)):
        with pytest.raises(OSError, match="vLLM got the name '.*' of a model that was changed in memory"):
            call()
    assert llm(model=str(folder), seed=1).loaded == (str(folder), 1)
