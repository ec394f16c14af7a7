"""Models that others trained are loaded whole, from safetensors alone, without running code of theirs."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from hf_qknorm import patch_model
from hf_qknorm.checkpoint.pretrained import load_causal, load_tokenizer
from hf_qknorm.checkpoint.source import open_source
from qknorm_tests.folders import configure
from qknorm_tests.tiny import tiny_model


def test_a_causal_model_keeps_its_weights_and_its_name(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    expected = dict(torch.nn.Module.state_dict(tiny_model("llama")))
    with open_source(tmp_path) as source:
        model = load_causal(source, torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.name_or_path == str(tmp_path)
    assert set(model.state_dict()) == set(expected)


def test_weights_that_are_missing_are_not_made_up(tmp_path):
    tiny_model("llama").base_model.save_pretrained(tmp_path)
    with open_source(tmp_path) as source, pytest.raises(ValueError, match=r"no entry for lm_head.weight"):
        load_causal(source, "auto")


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_models_that_predict_no_tokens_are_refused(head, patched, tmp_path):
    model = getattr(transformers, f"LlamaFor{head}")(tiny_model("llama").config)
    (patch_model(model, "qk_norm") if patched else model).save_pretrained(tmp_path)
    message = rf"config.json: the checkpoint is a {'QKNorm' if patched else ''}LlamaFor{head}, which predicts no tokens"
    with open_source(tmp_path) as source, pytest.raises(ValueError, match=message):
        load_causal(source, "auto")


def test_a_config_may_name_no_class(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    configure(tmp_path, architectures=None)
    with open_source(tmp_path) as source:
        assert type(load_causal(source, "auto")).__name__ == "LlamaForCausalLM"


def test_the_whole_message_of_a_tokenizer_that_is_missing_is_kept(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises((ValueError, OSError), match=r"no tokenizer can be loaded: .* one of: \(1\) .*\(3\)") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_a_tokenizer_of_strange_code_is_refused_in_a_line(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}})
    )
    (tmp_path / "evil.py").write_text("raise SystemExit('it was run')")
    with pytest.raises((ValueError, OSError), match="no tokenizer can be loaded") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_an_index_without_metadata_is_named(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": json.loads(index.read_text())["weight_map"]}))
    with open_source(tmp_path) as source, pytest.raises(ValueError, match='index.json has no "metadata"'):
        load_causal(source, "auto")
