"""Untrusted configs, reports and weights are read as data, never as code, and bad ones raise a clear ValueError."""

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hf_qknorm import Scheme
from hf_qknorm.checkpoint import open_source
from hf_qknorm.convert.card import is_generated_card
from hf_qknorm.files.names import INDEX, SINGLE
from hf_qknorm.files.untrusted import read_json
from hf_qknorm.model.derived import derived_config
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
