"""Checkpoints that others made are loaded whole, from safetensors alone, without running code of theirs."""

import pytest
import torch
import transformers

from hf_qknorm import patch_model
from hf_qknorm.checkpoint import load_causal, load_model, open_source
from hf_qknorm.files.untrusted import load_tokenizer
from hf_qknorm.inspection import inspect
from hf_qknorm.inspection.inspect import inspect_checkpoint
from hf_qknorm.model.placement import placement
from qknorm_tests.folders import configure, edit, save_with_tokenizer
from qknorm_tests.tables import sharp_model
from qknorm_tests.tiny import tiny_model


def test_a_model_is_loaded_in_the_dtype_of_its_config(tmp_path):
    tiny_model("llama").bfloat16().save_pretrained(tmp_path, max_shard_size="60KB")
    source = open_source(tmp_path)
    assert source.model_class is transformers.LlamaForCausalLM
    assert load_model(source).dtype == torch.bfloat16
    model = load_causal(source, dtype=torch.float32)
    assert model.dtype == torch.float32
    assert model.name_or_path == str(tmp_path)


def test_weights_that_are_missing_are_not_made_up(tmp_path):
    tiny_model("llama").base_model.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    with pytest.raises(ValueError, match="the checkpoint is a LlamaModel, which predicts no tokens to measure"):
        load_causal(source)


def test_a_warning_names_tensors_that_the_class_does_not_load(tmp_path, caplog):
    tiny_model("llama").save_pretrained(tmp_path)
    open_source(tmp_path)
    assert not caplog.text
    edit(tmp_path, lambda tensors: tensors.update({"v_head.weight": torch.ones(1, 8)}))
    load_model(open_source(tmp_path))
    assert caplog.text.count("a LlamaForCausalLM has no place for 1 tensors, and drops ['v_head.weight']") == 1


def test_a_quantised_checkpoint_is_opened(tmp_path):
    """Its quantiser decides on the tensors."""
    tiny_model("llama").save_pretrained(tmp_path)
    configure(tmp_path, quantization_config={"quant_method": "fp8"}, num_hidden_layers=5)
    assert open_source(tmp_path).model is None


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_models_that_predict_no_tokens_are_refused(head, patched, tmp_path):
    model = getattr(transformers, f"LlamaFor{head}")(tiny_model("llama").config)
    (patch_model(model, "qk_norm") if patched else model).save_pretrained(tmp_path)
    message = rf"config.json: the checkpoint is a {'QKNorm' if patched else ''}LlamaFor{head}, which predicts no tokens"
    with pytest.raises(ValueError, match=message):
        load_causal(open_source(tmp_path))


def test_the_whole_message_of_a_tokenizer_that_is_missing_is_kept(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises((ValueError, OSError), match=r"no tokenizer can be loaded: .* one of: \(1\) .*\(3\)") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_an_inspection_of_layers_in_files(tmp_path, monkeypatch):
    folder = save_with_tokenizer(sharp_model("llama", vocab_size=300), tmp_path / "source", max_shard_size="60KB")
    text = tmp_path / "text.txt"
    text.write_text("to be, or not to be: that is the question. " * 20)
    whole = inspect_checkpoint(str(folder), data=str(text), max_tokens=512)
    monkeypatch.setattr(inspect, "placement", lambda place, _, offload: placement(place, 60_000, offload))
    streamed = inspect_checkpoint(str(folder), data=str(text), max_tokens=512)
    assert streamed.base.loss == whole.base.loss
    assert streamed.advice.scheme == whole.advice.scheme
