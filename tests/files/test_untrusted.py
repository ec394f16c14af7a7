"""Untrusted files are read as data, never as code; bad ones raise a clear ValueError; no other file is copied."""

import json
import os
import shutil
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_qknorm import Scheme, calibrate, convert_checkpoint, export_native
from hf_qknorm.checkpoint import open_source
from hf_qknorm.convert.card import is_generated_card, write_card
from hf_qknorm.demo import run_demo
from hf_qknorm.files.names import INDEX, SINGLE
from hf_qknorm.files.untrusted import read_json
from hf_qknorm.inspection.inspect import inspect_checkpoint
from hf_qknorm.model.derived import derived_config
from qknorm_tests.folders import configure, save_with_tokenizer
from qknorm_tests.hostile import NASTY, as_json, outcome, variants
from qknorm_tests.tiny import tiny_model


def test_each_part_of_a_scheme():
    for data in variants(Scheme(q="rms", k="lp", p=3.0, softcap=50.0).to_dict()):
        for read in (Scheme.from_dict, Scheme.of):
            scheme = outcome(lambda read=read, data=data: read(data))
            if scheme is not None:
                assert Scheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme
                assert len(str(scheme)) < 300


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_each_part_of_a_config(model_type):
    made: dict[str, Any] = {"qk_norm": {"q": "rms", "softcap": 30.0}, "attn_logit_softcapping": 30.0}
    made |= {"qk_norm_base": {"attn_logit_softcapping": 50.0}}
    assert derived_config(model_type)(**made).scheme.softcap == 30
    for keys in variants(made):
        # Gemma has a field of this name, which transformers checks
        if isinstance(keys, dict) and (model_type == "llama" or type(keys.get("attn_logit_softcapping", 1.0)) is float):
            config = outcome(lambda keys=keys: derived_config(model_type)(**keys))
            if config is not None and config.qk_norm is not None:
                assert config.scheme == Scheme.from_dict(config.qk_norm)
                again = outcome(lambda config=config: type(config).from_dict(json.loads(config.to_json_string())))
                assert again is None or again.scheme == config.scheme


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "folder")
    return tmp_path / "folder"


def test_each_part_of_headers_and_indices(folder):
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    for header in variants({"weight": entry, "__metadata__": {"format": "pt"}}):
        text = as_json(header).encode()
        (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 16)
        assert outcome(lambda: open_source(folder)) is None
    shard = (folder / SINGLE).rename(folder / "shard.safetensors").name  # a single file would be read instead
    for index in variants({"metadata": {"total_size": 1}, "weight_map": {"weight": shard}}):
        (folder / INDEX).write_text(as_json(index))
        with suppress(FileNotFoundError):  # a file that the index names must exist
            assert outcome(lambda: open_source(folder)) is None


@pytest.mark.parametrize("name", ["../x.safetensors", "OUTSIDE", "x\0", "\n", "x" * 300, "", 3, None])
def test_an_index_names_only_files_of_its_folder(folder, name):
    outside = (folder / SINGLE).rename(folder.parent / "x.safetensors")
    name = str(outside) if name == "OUTSIDE" else name
    (folder / INDEX).write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises((ValueError, OSError), match=r"outside the folder|json names .* missing") as error:
        open_source(folder)
    assert "\n" not in str(error.value)


MATTER = ["[" * 900, "- " * 900, "a: " * 500, "? " * 900, "\0", "\ud800", "%", "&a *a", *map(as_json, NASTY)]


@pytest.mark.parametrize("matter", MATTER, ids=lambda matter: ascii(matter[:20]))
def test_front_matter(tmp_path: Path, matter: str) -> None:
    (tmp_path / "README.md").write_text(f"---\n{matter}\n---\n", encoding="utf-8", errors="replace")
    assert is_generated_card(tmp_path / "README.md") in (False, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 5000, "x.json is no JSON .recursion limit"),
        ("{", "x.json is no JSON"),
        ("1" * 99, "larger than 20 bytes"),
    ],
)
def test_json_that_is_deep_broken_or_long_is_refused(tmp_path, text, message):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_json(tmp_path / "x.json", 20 if "larger" in message else 10_000)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A plain checkpoint with a tokenizer."""
    return save_with_tokenizer(tiny_model("llama", vocab_size=300, initializer_range=0.2), tmp_path / "source")


def booby_trap(folder: Path, sign: Path) -> None:
    """Add code and pickles that would create the file `sign` if run, under every name that transformers looks for."""
    code = f"open({str(sign)!r}, 'w').close()\n"
    for name in ("modeling_qknorm", "configuration_qknorm", "tokenization_qknorm", "custom_generate/generate"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(code)

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(sign), "w")

    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt", "model.pkl"):
        torch.save(Bomb(), folder / name)
    maps = {"config.json": {}, "tokenizer_config.json": {"AutoTokenizer": ["tokenization_qknorm.Evil", None]}}
    maps["config.json"] |= {f"Auto{kind}": "modeling_qknorm.Evil" for kind in ("Config", "Model", "ModelForCausalLM")}
    for name, auto_map in maps.items():
        held = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(held | {"auto_map": auto_map}))


def test_no_code_of_a_checkpoint_is_run(source, tmp_path):
    sign, text = tmp_path / "sign", tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    booby_trap(source, sign)
    inspect_checkpoint(str(source), data=str(text), max_tokens=256)
    for scheme, options in {"qk_norm": {"data": str(text), "knee": 0}, "soft_cap": {}}.items():
        converted = tmp_path / scheme
        convert_checkpoint(source, converted, scheme, **options)
        assert not list(converted.glob("*.bin"))
        booby_trap(converted, sign)
        model = AutoModelForCausalLM.from_pretrained(converted)
        assert type(model).__module__.startswith("hf_qknorm")
        calibrate(model, str(text), knee=0, max_tokens=256)
        inspect_checkpoint(str(converted), data=str(text), max_tokens=256)
        write_card(converted)
    export_native(tmp_path / "qk_norm", tmp_path / "native")
    assert not list((tmp_path / "native").rglob("*.py"))
    assert not sign.exists()


def test_an_unknown_model_type_with_code_is_refused(source, tmp_path):
    booby_trap(source, tmp_path / "sign")
    configure(source, model_type="evil")
    with pytest.raises(ValueError, match="custom code"):
        convert_checkpoint(source, tmp_path / "out")
    with pytest.raises((ValueError, OSError), match="custom code"):
        inspect_checkpoint(str(source))
    with pytest.raises((ValueError, OSError), match="custom code"):
        run_demo(checkpoint=str(source), out=str(tmp_path / "demo"))
    assert not (tmp_path / "sign").exists()
    assert not (tmp_path / "out").exists()


def test_links_of_the_hubs_cache_are_copied(source, tmp_path):
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / ("0" * 40), repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(sorted(source.iterdir())):
        shutil.copyfile(path, blobs / str(i))
        (snapshot / path.name).symlink_to(os.path.relpath(blobs / str(i), snapshot))
    convert_checkpoint(snapshot, tmp_path / "out", "qk_norm")
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_symlink()]
    (tmp_path / "key").write_text("secret")
    (snapshot / "LICENSE").symlink_to(tmp_path / "key")
    with pytest.raises(ValueError, match="LICENSE is a link to"):
        convert_checkpoint(snapshot, tmp_path / "again", "qk_norm")
