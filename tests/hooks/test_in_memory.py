"""The name of a model that was changed in memory: models are copied for it, and tokenizers and cards get a string."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from importlib import import_module

import pytest
import torch
import yaml
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
)

from hf_qknorm import SCHEMES, calibrate, patch_model, unpatch_model
from hf_qknorm.model.in_memory import InMemoryName
from hf_qknorm.small_model import byte_tokenizer
from qknorm_tests.tables import KNEES, PAIRS, TRIED, make_batch, randomise, sharp_model
from qknorm_tests.tiny_towers import tiny_towers

CHANGES = [(model_type, name) for model_type, name in [*PAIRS, *KNEES] if not TRIED[name].changes_nothing]


@pytest.fixture
def folder(tmp_path):
    """An unpatched checkpoint."""
    sharp_model("llama").save_pretrained(tmp_path / "unpatched")
    return tmp_path / "unpatched"


@pytest.fixture
def patched(folder):
    return randomise(patch_model(AutoModelForCausalLM.from_pretrained(folder), "qk_norm_cap"))


@pytest.mark.parametrize(("model_type", "name"), CHANGES)
@torch.no_grad()
def test_the_copy_computes_the_same_and_shares_nothing(model_type, name):
    model = randomise(patch_model(sharp_model(model_type), TRIED[name]))
    again = type(model).base_class.from_pretrained(model.name_or_path)
    assert type(again) is type(model)
    assert not again.training
    assert again.config.to_dict() == {**model.config.to_dict(), "dtype": "float32"}
    batch = make_batch("left")
    expected = model(**batch).logits
    assert torch.equal(again(**batch).logits, expected)
    for parameter in model.parameters():
        parameter.zero_()
    assert torch.equal(again(**batch).logits, expected)


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, LlamaForCausalLM])
def test_the_copy_has_the_model_in_memory_and_the_options(auto, patched, folder, caplog):
    options = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    again, info = auto.from_pretrained(
        pretrained_model_name_or_path=patched.config.name_or_path, output_loading_info=True, **options
    )
    assert f"{str(folder)!r}): the model of this name was changed in memory" in caplog.text
    assert not any(info.values())
    assert again.dtype == torch.bfloat16
    assert again.config._attn_implementation == "eager"
    assert patched.config._attn_implementation == "hf_qknorm"
    assert again.name_or_path.model() is again.config.name_or_path.model() is again


def test_the_auto_class_returns_the_config_of_the_model_in_memory(patched, folder, tmp_path):
    """A model that is made of it is patched, as the copy is."""
    config = AutoConfig.from_pretrained(patched.name_or_path, max_position_embeddings=64)
    assert config.to_dict() == patched.config.to_dict() | {"max_position_embeddings": 64}
    assert config.name_or_path == str(folder)
    assert type(AutoModelForCausalLM.from_config(config)) is type(patched)
    assert AutoConfig.from_pretrained(patched.name_or_path, return_unused_kwargs=True, other=1)[1] == {"other": 1}
    patched.save_pretrained(tmp_path / "out")
    unpatched = unpatch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert AutoConfig.from_pretrained(unpatched.name_or_path).model_type == "llama"
    name, plain = patched.name_or_path, type(patched).base_class.config_class
    assert plain.from_pretrained(name).model_type == "llama"  # the config of the file


def test_tokenizers_are_those_of_the_folder(patched, folder, caplog):
    byte_tokenizer().save_pretrained(folder)
    gone = InMemoryName(folder, patch_model(sharp_model("llama"), "soft_cap"))
    for name in (patched.name_or_path, gone):
        assert AutoTokenizer.from_pretrained(name).get_vocab() == byte_tokenizer().get_vocab()
    assert "changed in memory, and is gone: its file is read" in caplog.text


def test_anywhere_else_the_name_is_a_string(patched, folder, tmp_path):
    name = patched.name_or_path
    for other in (copy.deepcopy(name), pickle.loads(pickle.dumps(name)), patched.config.to_dict()["_name_or_path"]):
        assert type(other) is str
        assert other == name
    assert yaml.safe_load(yaml.dump({"base_model": name})) == json.loads(json.dumps({"base_model": name}))
    for dumper in (yaml.SafeDumper, yaml.CDumper, yaml.CSafeDumper):
        assert yaml.safe_load(yaml.dump([name], Dumper=dumper)) == [str(folder)]
    patched.save_pretrained(tmp_path / "out")
    assert str(folder) not in (tmp_path / "out" / "config.json").read_text()
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "out").name_or_path) is str


def test_unpatching_gives_the_plain_name_back(patched, folder):
    unpatch_model(patched)
    assert type(patched.name_or_path) is type(patched.config.name_or_path) is str
    assert patched.name_or_path == str(folder)


def test_changes_to_a_patched_checkpoint_are_marked(patched, tmp_path):
    """Its own name no longer leads to the model once it is calibrated or unpatched."""
    patched.save_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    calibrate(model, [make_batch("plain", labels=False)], "moments")
    again = AutoModelForCausalLM.from_pretrained(model.name_or_path)
    assert torch.equal(again.model.layers[0].self_attn.q_norm.weight, model.model.layers[0].self_attn.q_norm.weight)
    unpatched = unpatch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert type(LlamaForCausalLM.from_pretrained(unpatched.name_or_path)) is LlamaForCausalLM


def test_a_model_that_cannot_be_copied_is_refused(patched, folder):
    name = patched.name_or_path
    with pytest.raises(ValueError, match=r"it is a QKNormLlamaForCausalLM\. .* Save the changed model and give its"):
        AutoModel.from_pretrained(name)
    patched.lm_head.weight.ds_id = 0  # as DeepSpeed marks a shard
    with pytest.raises(ValueError, match="DeepSpeed ZeRO-3 shards its weights"):
        LlamaForCausalLM.from_pretrained(name)
    del patched.lm_head.weight.ds_id
    with pytest.raises(ValueError, match="quantization_config needs weights from the disk"):
        LlamaForCausalLM.from_pretrained(name, quantization_config={"quant_method": "bitsandbytes"})
    patched.hf_quantizer = object()  # as on a checkpoint that is loaded quantised
    with pytest.raises(ValueError, match="its weights are quantised"):
        LlamaForCausalLM.from_pretrained(name)
    del patched.hf_quantizer
    patched.model.layers[0].self_attn.q_proj.other = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"changed its weights' names, such as .*q_proj\.other\.bias"):
        LlamaForCausalLM.from_pretrained(name)
    with pytest.raises(ValueError, match="some of its weights are offloaded"):
        LlamaForCausalLM.from_pretrained(patched.to("meta").name_or_path)
    gone = InMemoryName(folder, patch_model(sharp_model("llama"), SCHEMES["soft_cap"]))
    with pytest.raises(ValueError, match="it is no longer in memory"):
        LlamaForCausalLM.from_pretrained(gone)


def test_a_sharded_model_is_refused(patched, process_group):
    fully_shard(patched, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="its weights are sharded"):
        LlamaForCausalLM.from_pretrained(patched.name_or_path)


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
        with pytest.raises(ValueError, match="vLLM got the name of a model that was changed in memory"):
            call()
    assert llm(model=str(folder), seed=1).loaded == (str(folder), 1)


@torch.no_grad()
def test_a_model_with_a_patched_tower_is_copied_whole(tmp_path):
    tiny_towers("llava").save_pretrained(tmp_path)
    model = randomise(patch_model(LlavaForConditionalGeneration.from_pretrained(tmp_path), "qk_norm_cap"))
    request = {"attn_implementation": model.config._attn_implementation}  # as TRL does
    again = LlavaForConditionalGeneration.from_pretrained(model.name_or_path, **request)
    batch = make_batch("plain")
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    assert again.config.text_config.scheme == model.config.text_config.scheme
    assert type(unpatch_model(model).name_or_path) is str
