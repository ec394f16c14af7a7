"""Untrusted checkpoints: none of their code is run, and no other file of this machine is copied."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_qknorm import calibrate, convert_checkpoint, export_native
from hf_qknorm.convert.card import write_card
from hf_qknorm.demo import run_demo
from hf_qknorm.inspection.inspect import inspect_checkpoint
from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.tiny import tiny_model


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
    config = json.loads((source / "config.json").read_text()) | {"model_type": "evil"}
    (source / "config.json").write_text(json.dumps(config))
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
