"""What can't be converted is refused, and nothing is written."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, BartForConditionalGeneration, BertForMaskedLM

from hf_qknorm import SCHEMES, Scheme, calibrate, convert_checkpoint, patch_model
from hf_qknorm.convert import convert
from qknorm_tests.folders import configure, contents, edit, loaded, save, save_with_tokenizer
from qknorm_tests.tables import sharp_model, trained_like
from qknorm_tests.tiny import tiny_config, tiny_model
from qknorm_tests.tiny_towers import tiny_towers

INDEX, NORM = "model.safetensors.index.json", "model.layers.1.self_attn.q_norm.weight"
TEXT = "to be or not to be " * 20
BATCHES = [{"input_ids": torch.randint(3, 59, (4, 24), generator=torch.Generator().manual_seed(i))} for i in range(3)]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


def _link(path: Path) -> None:
    """Move a file or folder of the source beside the source, and link to it."""
    outside = path.parent.parent / "elsewhere"
    outside.mkdir()
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


def _pickled(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


# How a sharded checkpoint with a tokenizer is damaged, and the message of the refusal.
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated shard": (lambda f: _truncate(_shard(f)), r"model-00002-of-\d+.safetensors is truncated or corrupted"),
    "corrupted shard": (lambda f: _shard(f).write_bytes(b"\xff" * 4096), r"model-00002.* is truncated or corrupted"),
    "missing shard": (lambda f: _shard(f).unlink(), r"index.json names 'model-00002.*', which is missing"),
    "corrupted index": (lambda f: _truncate(f / INDEX), r"index.json is no JSON"),
    "index without map": (lambda f: (f / INDEX).write_text("{}"), r'index.json has no "weight_map"'),
    "pickled weights": (_pickled, r"source holds no model.safetensors and no .*Pickled weights are not read, because"),
    "no config": (lambda f: (f / "config.json").unlink(), r"config.json is missing"),
    "config of a list": (lambda f: (f / "config.json").write_text("[]"), r"config\.json( can't be read|\. )?"),
    "corrupted tokenizer": (lambda f: _truncate(f / "tokenizer.json"), r"source: no tokenizer can be loaded"),
    "quantised": (lambda f: configure(f, quantization_config={}), r"config.json: this checkpoint is quantised"),
    "unsupported": (lambda f: configure(f, model_type="mamba"), r"model_type 'mamba' is not supported"),
    "adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), r"holds an adapter: merge it"),
    "link": (lambda f: _link(f / "LICENSE"), r"source/LICENSE is a link to .*elsewhere/LICENSE, outside the folder"),
    "linked templates": (lambda f: _link(f / "additional_chat_templates"), r"templates.* is a link to .*, outside the"),
    "linked weights": (lambda f: _link(_shard(f)), r"source/model-00002.* is a link to .*, outside the folder"),
    "generation config": (
        lambda f: (f / "generation_config.json").write_text('{"max_new_tokens": '),
        r"generation_config.json can.t be read",
    ),
    "no class": (lambda f: configure(f, architectures=None), r'"architectures" is \'missing\', expected the name of a'),
    "foreign class": (lambda f: configure(f, architectures=["Nobody"]), r'"architectures" is \[\'Nobody\'\], expected'),
    **{
        f"class {name}": (lambda f, name=name: configure(f, architectures=name), r"config\.json.*architectures")
        for name in (["pipeline"], ["AutoModel"], ["os.system"], [3], [["x"]], {"a": 1}, "LlamaForCausalLM")
    },
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_sources_are_refused_by_file(damage, llama, tmp_path):
    change, message = DAMAGE[damage]
    change(llama)
    before = contents(tmp_path)
    with pytest.raises((ValueError, OSError), match=message) as error:
        convert_checkpoint(llama, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert contents(tmp_path) == before
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def _without(tensors: dict[str, torch.Tensor], part: str) -> None:
    for name in [name for name in tensors if part in name]:
        del tensors[name]


def _stored_as(name: str, dtype: torch.dtype) -> Callable[[Path], None]:
    return lambda f: edit(f, lambda t: t.update({name: torch.ones_like(t[name], dtype=dtype)}))


Q_PROJ, UP_PROJ = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"
# How the weights of a checkpoint in one file are changed.
WEIGHTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no MLP": (
        lambda f: edit(f, lambda t: _without(t, ".mlp.")),
        r"source: no weights for model.layers.0.mlp.down_proj.weight and 5 more, which config.json asks for \(Llama",
    ),
    "too many layers": (lambda f: configure(f, num_hidden_layers=5), r"no weights for model.layers.2.\S+ and \d+ more"),
    "another class": (
        lambda f: configure(f, architectures=["LlamaForSequenceClassification"]),
        r"no weights for score.weight, .*LlamaForSequenceClassification",
    ),
    "class of another model": (lambda f: configure(f, architectures=["GPT2LMHeadModel"]), r"source: .*GPT2LMHeadModel"),
    "another shape": (
        lambda f: configure(f, intermediate_size=80),
        r"source: model.layers.0.mlp.\S+ has shape \[\d+, \d+\], expected \[",
    ),
    "norms of a patched model": (
        lambda f: edit(f, lambda t: t.update({NORM: torch.ones(16)})),
        rf"source: {NORM} is the weight of a norm that a LlamaForCausalLM does not have",
    ),
    "int8": (_stored_as(Q_PROJ, torch.int8), rf"model.safetensors: {Q_PROJ} is stored as I8: dequantise it first"),
    "fp8": (_stored_as(UP_PROJ, torch.float8_e4m3fn), rf"{UP_PROJ} is stored as F8_E4M3: dequantise it first"),
}


@pytest.mark.parametrize("damage", WEIGHTS)
def test_weights_that_do_not_fit_are_refused_by_their_headers(damage, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "load_model", None)
    change, message = WEIGHTS[damage]
    source = save(tiny_model("llama"), tmp_path / "source")
    change(source)
    for dry_run in (True, False):
        with pytest.raises(ValueError, match=message) as error:
            convert_checkpoint(source, tmp_path / "out", "qk_norm", dry_run=dry_run)
        assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("parts", [("w1", "w2", "w3"), ("w1",)], ids=["an expert", "half an expert"])
def test_a_missing_expert_is_refused(parts, tmp_path):
    source = save(tiny_model("mixtral"), tmp_path / "source")
    gone = [f"model.layers.1.block_sparse_moe.experts.1.{part}.weight" for part in parts]
    edit(source, lambda t: [t.pop(name) for name in gone])
    with pytest.raises(ValueError, match="source: .*MixtralForCausalLM"):
        convert_checkpoint(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("max_memory", [None, 60_000], ids=["in memory", "in files"])
@pytest.mark.parametrize("name", ["model.norm.weight", UP_PROJ])
def test_weights_that_are_not_finite_are_refused(name, max_memory, tmp_path):
    source = save(tiny_model("llama"), tmp_path / "source")
    edit(source, lambda t: t[name].view(-1)[-1:].fill_(torch.inf))
    with pytest.raises(ValueError, match=rf"source: {name} holds NaN or infinity, expected finite numbers"):
        convert_checkpoint(source, tmp_path / "out", max_memory=max_memory)
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("sign", [1, -1])
def test_gains_that_float16_cannot_hold_are_not_written(sign, tmp_path):
    """Keys near a constant have a bias far larger than themselves."""
    model = sharp_model("qwen2", vocab_size=300, num_hidden_layers=1)
    with torch.no_grad():
        attention = model.model.layers[0].self_attn
        attention.k_proj.bias.fill_(sign * 6e4)
        attention.k_proj.weight.mul_(100)
        attention.q_proj.weight.mul_(1e-4)
    save_with_tokenizer(model.half(), tmp_path / "source")
    scheme = Scheme(q="rms", k="rms", bias=True)
    with pytest.raises(ValueError, match=r"calibrated: model.layers.0.self_attn.k_norm.* holds .*float16 has no room"):
        convert_checkpoint(tmp_path / "source", tmp_path / "out", scheme, data=[TEXT], knee=4.0)
    assert os.listdir(tmp_path) == ["source"]


def test_other_refusals(llama, tmp_path):
    out = tmp_path / "out"
    convert_checkpoint(llama, out, "qk_norm")
    before = contents(out)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.png").write_text("")
    biased = save(trained_like("gpt2"), tmp_path / "biased")
    for arguments, message in (
        ((llama, out), r"out is not empty: .*--overwrite"),
        ((llama, tmp_path / "photos", "qk_norm", {"overwrite": True}), "holds no config.json"),
        ((llama, llama / "LICENSE", "qk_norm", {"overwrite": True}), "LICENSE is a file"),
        ((out, tmp_path / "twice"), r"is converted already \(q=rms, k=rms\)"),
        ((tmp_path / "nowhere", tmp_path / "new"), "nowhere is no folder"),
        ((llama, tmp_path / "new", "qk_nrom"), "did you mean 'qk_norm'"),
        ((llama, tmp_path / "new", "none"), "this scheme changes nothing"),
        ((biased, tmp_path / "new", "qkv_norm"), r"can't fold the biases .*exactly.* Pass data="),
        ((llama, tmp_path / "new", "qk_norm", {"knee": "guess", "data": ["text"]}), "knee='guess': expected"),
        ((llama, tmp_path / "new", "qk_norm", {"max_loss_increase": 0.1}), "max_loss_increase is for a calibration"),
        ((llama, tmp_path / "new", "qk_norm", {"knee": 0}), "knee is for a calibration"),
        ((llama, tmp_path / "new", "qk_norm", {"data": [TEXT], "max_tokens": 0}), "max_tokens=0: expected at least 1"),
        (
            (llama, tmp_path / "new", "qk_norm", {"data": [TEXT], "max_loss_increase": -9.0}),
            "more than max_loss_increase=-9",
        ),
        *(
            ((llama, tmp_path / "new", "qk_norm", {"max_memory": wrong}), "is no size of memory: expected bytes")
            for wrong in ([8], {"cpu": None}, {0: "8GB"})
        ),
        ((llama, tmp_path / "new", "qk_norm", {"data": ["to be"]}), "the text gives 4 tokens to predict, expected"),
    ):
        *positional, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
        with pytest.raises((ValueError, OSError), match=message):
            convert_checkpoint(*positional, **options)
    assert contents(out) == before
    assert sorted(os.listdir(tmp_path)) == ["biased", "out", "photos", "source"]
    convert_checkpoint(llama, out, "soft_cap", overwrite=True)
    assert loaded(out).config.scheme == SCHEMES["soft_cap"]


@pytest.mark.parametrize(
    ("model_type", "model_class", "message"),
    [
        ("bart", BartForConditionalGeneration, "bart is an encoder-decoder, and models with one stack"),
        ("bert", BertForMaskedLM, "BertForMaskedLM has bidirectional attention and predicts masked tokens: give batch"),
    ],
)
def test_models_that_a_text_can_not_calibrate_are_refused_before_their_weights_are_read(
    model_type, model_class, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(convert, "load_model", None)
    model = model_class(tiny_config(model_type, vocab_size=300, is_decoder=False))
    source = save_with_tokenizer(model, tmp_path / "source")
    (tmp_path / "text.txt").write_text(TEXT)
    for dry_run in (True, False):
        with pytest.raises(ValueError, match=message):
            convert_checkpoint(source, tmp_path / "out", "qk_norm", data=tmp_path / "text.txt", dry_run=dry_run)


def test_a_masked_model_is_calibrated_on_batches_with_labels(tmp_path):
    source = save(BertForMaskedLM(tiny_config("bert", vocab_size=64, is_decoder=False)), tmp_path / "source")
    tokens = torch.randint(3, 64, (4, 20))
    labels = tokens.where(torch.rand(tokens.shape) < 0.5, -100)
    report = convert_checkpoint(source, tmp_path / "out", "qk_norm", data=[{"input_ids": tokens, "labels": labels}])
    assert report is not None
    assert report.tokens == 80


def test_a_dry_run_refuses_an_exportable_conversion_that_has_no_native_model(llama, tmp_path):
    """The default scheme has a cap."""
    with pytest.raises(ValueError, match=r"norms .* or the cap of 50 would be lost"):
        convert_checkpoint(llama, tmp_path / "out", data=[TEXT], exportable=True, dry_run=True)


def test_a_dry_run_tries_the_text_and_leaves_an_iterator(llama, tmp_path):
    texts = iter([TEXT])
    convert_checkpoint(llama, tmp_path / "out", data=texts, dry_run=True)
    assert list(texts)
    (tmp_path / "text.txt").write_text("to be")
    with pytest.raises(ValueError, match="the text gives 4 tokens to predict, expected at least 16"):
        convert_checkpoint(llama, tmp_path / "out", data=str(tmp_path / "text.txt"), dry_run=True)


def test_of_a_multimodal_model_the_text_tower_is_converted(tmp_path, capsys):
    model = tiny_towers("llava")
    source, options = save(model, tmp_path / "source"), {"data": BATCHES, "knee": 0}
    with pytest.raises(ValueError, match=r"code can be made for llava, of which model.language_model alone is patched"):
        convert_checkpoint(source, tmp_path / "out", **options)
    convert_checkpoint(source, tmp_path / "out", standalone=False, dry_run=True)
    assert "2 attention layers, 4 norms" in capsys.readouterr().out
    report = convert_checkpoint(source, tmp_path / "out", standalone=False, **options)
    patch_model(model, "qk_norm_cap")
    assert calibrate(model.model.language_model, **options).layers.keys() == report.layers.keys()
    found = AutoModelForImageTextToText.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(x, found[name]) for name, x in model.state_dict().items())
    assert (tmp_path / "out" / "qk_norm_report.json").is_file()
    with pytest.raises(ValueError, match="is converted already"):
        convert_checkpoint(tmp_path / "out", tmp_path / "again", standalone=False)


def test_a_full_disk(llama, tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: free)
    with pytest.raises(OSError, match=r"out needs .*B, and .* has 10.0B: nothing was written"):
        convert_checkpoint(llama, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]
