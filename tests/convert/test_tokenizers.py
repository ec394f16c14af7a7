"""A tokenizer that is copied to a model of another type splits text as before."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoTokenizer, PretrainedConfig

from hf_qknorm import convert_checkpoint, export_native, patch_model, push_to_hub
from qknorm_tests.folders import save
from qknorm_tests.tables import sharp_model

TEXT = " a b</s>a  c"
VOCABULARY = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", "▁", "a", "b", "c", " ", "▁a", "Ġ", "Ċ"])}
SETTINGS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def add_tokenizer(folder: Path, name: str | None) -> Path:
    """Add a tokenizer that no class but the general one reads as it is, and settings with the `name` of a class."""
    tokenizer = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[("▁", "a")], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens([*SETTINGS.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS | ({"tokenizer_class": name} if name else {})))
    return folder


CASES = [(t, name, how) for t, name in (("mistral", "LlamaTokenizer"), ("gpt2", None)) for how in ("convert", "push")]
CASES += [(t, name, "export") for t, name in (("mistral", "LlamaTokenizer"), ("llama", None))]


@pytest.mark.parametrize(("model_type", "name", "how"), CASES)
def test_a_tokenizer_keeps_its_class(hub, tmp_path, model_type, name, how):
    model = sharp_model(model_type)
    source = add_tokenizer(save(model, tmp_path / "source"), name)
    patched = add_tokenizer(save(patch_model(model, "qk_norm"), tmp_path / "patched"), name)
    before, out = AutoTokenizer.from_pretrained(source), tmp_path / "out"
    options = {"config": PretrainedConfig(model_type="unknown")}  # as the patched one is without the package
    if how == "convert":
        convert_checkpoint(source, out, "qk_norm")
    elif how == "export":
        export_native(patched, out)
        options = {}
    else:
        push_to_hub(patched, "me/tiny")
        hub.save("me/tiny", out)
    again = AutoTokenizer.from_pretrained(out, **options)
    assert type(again) is type(before)
    assert again(TEXT) == before(TEXT)
    assert again.eos_token == "</s>"
