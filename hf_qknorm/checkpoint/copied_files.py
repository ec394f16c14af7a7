"""The files of a checkpoint that are copied: tokenizer, templates, generation config, licence, card."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from transformers import AutoTokenizer

from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.names import CODE_FILE, CONFIG, FOLDERS, KEPT_CARD, PLOTS, REPORT, TOKENIZER_FILES
from hf_qknorm.files.untrusted import read_json

# Weights in any format, and the state of a Trainer: they do not belong to the converted model.
WEIGHT_SUFFIXES = (
    ".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".onnx", ".ot", ".pickle", ".pkl", ".pt", ".pth",
    ".safetensors", ".tflite",
)  # fmt: skip
_NOT_COPIED = (CONFIG, "trainer_state.json", REPORT, KEPT_CARD, CODE_FILE, *PLOTS)
_WEIGHT_INDEX = re.compile(r".+\.index(\.[\w-]+)?\.json")  # of weights in any format, or of a variant such as fp16
_TOKENIZER_CONFIG = "tokenizer_config.json"
_MAPPINGS = ("generation_config.json", _TOKENIZER_CONFIG)
# The class of most tokenizers, whose name before transformers 5 every version knows, and the one that only Mistral's
# own package has.
_GENERAL = ("TokenizersBackend", "MistralCommonBackend")
_JSON_BYTES = 512 * 2**20  # the largest tokenizers have 30 MB


def copied_files(folder: Path) -> tuple[Path, ...]:
    """Return the names of the files of a checkpoint that are copied, relative to its folder.

    Raises ValueError, naming the file, for JSON or a tokenizer that can't be read, and for a link out of the folder:
    a copy could publish a private file.
    """
    files = tuple(file for file in file_names(folder) if (folder / file).is_file() and _is_copied(file))
    for file in files:
        _check_inside(folder, file)
        if file.suffix == ".json":
            data = read_json(folder / file, _JSON_BYTES)
            if file.name in _MAPPINGS and not isinstance(data, dict):
                raise ValueError(f"{folder / file} is {shorten(data)}, expected a mapping: download it again")
    tokenizer = [name for name in TOKENIZER_FILES if Path(name) in files]
    try:
        if tokenizer:
            AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # each tokenizer library has its own
        raise ValueError(
            f"{folder / tokenizer[0]}: the tokenizer can't be read ({type(error).__name__}: {error}). Download "
            f"{', '.join(tokenizer)} again, or move them away to convert without a tokenizer"
        ) from error
    return files


def file_names(folder: Path) -> list[Path]:
    """Return the files of a folder and of a checkpoint's folders in it, relative to it."""
    places = [folder, *(folder / name for name in FOLDERS if (folder / name).is_dir())]
    return sorted(path.relative_to(folder) for place in places for path in place.iterdir() if not path.is_dir())


def _is_copied(file: Path) -> bool:
    is_weights = file.suffix in WEIGHT_SUFFIXES or _WEIGHT_INDEX.fullmatch(file.name)
    return file.parent.name in FOLDERS or not (is_weights or file.name.startswith(".") or file.name in _NOT_COPIED)


def copy_files(folder: Path, files: Iterable[Path], target: Path) -> None:
    """Copy files of a checkpoint into the folder `target`; a tokenizer keeps its class. Raises as `copy_file` does."""
    names = {str(file) for file in files}
    for name in sorted(names):
        copy_file(folder, Path(name), target)
    if not names.isdisjoint(TOKENIZER_FILES):
        _keep_tokenizer_class(folder, target / _TOKENIZER_CONFIG)


def _keep_tokenizer_class(folder: Path, config: Path) -> None:
    """Name the class of a folder's tokenizer in the config of its copy, unless that has it.

    transformers selects a class by the model type if the config names none, and for some types if it names one. The
    copy belongs to another model type, and another class would split text differently.
    """
    settings = read_json(config, _JSON_BYTES) if config.is_file() else {}
    found = type(AutoTokenizer.from_pretrained(folder, trust_remote_code=False)).__name__
    known = "PreTrainedTokenizerFast" if found in _GENERAL else found
    stated = str(settings.get("tokenizer_class"))
    if "auto_map" not in settings and stated.removesuffix("Fast") not in (found, known.removesuffix("Fast")):
        text = json.dumps(settings | {"tokenizer_class": known}, indent=2, ensure_ascii=False) + "\n"
        config.write_text(text, encoding="utf-8")


def copy_file(folder: Path, name: Path, target: Path) -> None:
    """Copy the file `name` of `folder`, or the target of a link, into `target`. Raises OSError, naming the new file."""
    (target / name).parent.mkdir(exist_ok=True)
    try:
        shutil.copyfile(folder / name, target / name)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target / name)) from error


def _check_inside(folder: Path, file: Path) -> None:
    """Raise ValueError for a file outside its folder, and outside the blobs of a snapshot in the Hub's cache."""
    real, roots = Path(os.path.realpath(folder / file)), [Path(os.path.realpath(folder))]
    if folder.absolute().parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    if not any(real.is_relative_to(root) for root in roots):
        raise ValueError(f"{folder / file} is a link to {real}, outside the folder: put the file itself there")
