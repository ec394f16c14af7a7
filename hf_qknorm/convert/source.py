"""Where a checkpoint comes from: a folder or a Hub name, looked through before anything is written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from hf_qknorm.checkpoint_files import FOLDERS, INDEX, REPORT, SINGLE, TOKENIZER_FILES
from hf_qknorm.convert.shards import Weights
from hf_qknorm.files import is_path, user_path
from hf_qknorm.strangers import brief, hub_token, read_json

HTTPError: Any = HfHubHTTPError.__bases__[0]  # of httpx, whichever of its versions the Hub's client is built on
# Other forms of the weights, and what a Trainer leaves: they do not belong to the converted model.
LEFT_SUFFIXES = (
    ".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".onnx", ".ot", ".pickle", ".pkl", ".pt", ".pth",
    ".safetensors", ".tflite",
)  # fmt: skip
LEFT_NAMES = ("config.json", "trainer_state.json", INDEX, "pytorch_model.bin.index.json", REPORT)
TOKENIZER_BYTES = 512 * 2**20  # the largest have some 30 MB
MAPPINGS = ("generation_config.json", "tokenizer_config.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class Source:
    """A checkpoint: the name it was asked for by, its folder, its config, its weights, and the files that travel."""

    name: str
    folder: Path
    config: Any
    weights: Weights
    files: tuple[Path, ...]  # relative to the folder

    @property
    def model_class(self) -> Any:
        """The transformers class that its config names. Raises ValueError for one that transformers does not have."""
        architectures = self.config.architectures or []
        named = architectures[0] if isinstance(architectures, list) else None
        cls = getattr(transformers, named, None) if isinstance(named, str) else None
        if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
            raise ValueError(
                f'{self.folder / "config.json"}: "architectures" is {brief(architectures or "missing")}, expected '
                'the name of a class of transformers, as ["LlamaForCausalLM"]'
            )
        return cls


@contextmanager
def open_source(name: str | Path, *, allow_pickle: bool = False) -> Iterator[Source]:
    """Open a checkpoint by folder or Hub name and check it; pickled weights are read only where that is allowed.

    Raises FileNotFoundError for a folder or a file that is not there, and ValueError, naming the file, for one that is
    corrupted, for a tokenizer that can't be read, and for weights that are pickled, or an adapter.
    """
    folder = _folder(str(name), allow_pickle)
    config = _config(folder)
    files = travelling_files(folder)
    _check_tokenizer(folder, files)
    if _has_weights(folder):
        yield Source(str(name), folder, config, Weights(folder), files)
        return
    pickled = [file for file in PICKLED if (folder / file).is_file()]
    if pickled and not allow_pickle:
        raise ValueError(
            f"{folder / pickled[0]}: only pickled weights are there, and a pickle can run code when it is read. Look "
            "for a safetensors version, or trust it and convert it with allow_pickle=True (--allow-pickle)"
        )
    if not pickled:
        raise FileNotFoundError(f"{folder} holds no weights: expected {SINGLE} or {INDEX}")
    with TemporaryDirectory(prefix="hf-qknorm-") as staged:
        source = Source(str(name), folder, config, None, files)  # type: ignore[arg-type]
        model = source.model_class.from_pretrained(folder, dtype="auto", use_safetensors=False, weights_only=True)
        model.save_pretrained(staged)
        yield Source(str(name), folder, config, Weights(Path(staged)), files)


def travelling_files(folder: Path) -> tuple[Path, ...]:
    """What goes along with a checkpoint, relative to its folder: tokenizer, templates, licence, card, ….

    Raises ValueError, naming the file, for JSON that can't be read, and for a link to elsewhere: what it points to may
    be private, and would travel along.
    """
    files: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name in FOLDERS:
            files += [item.relative_to(folder) for item in sorted(path.iterdir()) if item.is_file()]
        elif path.is_file() and not (
            path.name.startswith(".") or path.suffix in LEFT_SUFFIXES or path.name in LEFT_NAMES
        ):
            files.append(Path(path.name))
    for file in files:
        _check_place(folder, file)
        if file.suffix == ".json":
            data = read_json(folder / file, TOKENIZER_BYTES)
            if file.name in MAPPINGS and not isinstance(data, dict):
                raise ValueError(f"{folder / file} is {brief(data)}, expected a mapping: download it again")
    return tuple(files)


def _check_place(folder: Path, file: Path) -> None:
    """Raise ValueError for a file that lies outside its folder, or outside the Hub's cache that the folder is in."""
    real, roots = Path(os.path.realpath(folder / file)), [Path(os.path.realpath(folder))]
    if folder.absolute().parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    if not any(real.is_relative_to(root) for root in roots):
        raise ValueError(f"{folder / file} is a link to {real}, outside the folder: put the file itself there")


def _folder(name: str, allow_pickle: bool) -> Path:
    path = user_path(name, "the source")
    if path.is_dir():
        return path
    if path.exists() or is_path(name):
        raise FileNotFoundError(f"{name} is no folder: expected one with a checkpoint, or the name of one on the Hub")
    hub_token()  # it goes along with each request
    wanted = (".safetensors", ".bin") if allow_pickle else (".safetensors",)
    unwanted = [f"*{suffix}" for suffix in LEFT_SUFFIXES if suffix not in wanted]
    try:
        return Path(snapshot_download(name, ignore_patterns=[*unwanted, "original/*", "onnx/*"]))
    except (OSError, HTTPError) as error:
        message = getattr(error, "server_message", None) or str(error).strip().partition("\n")[0]
        raise OSError(
            f"{name} is no folder here, and the Hub does not give it ({message}): check the name and the network, and "
            "log in (`hf auth login`) if it is private"
        ) from error


def read_config(folder: Path) -> Any:
    """The config of the checkpoint in a folder; no code of it is run.

    Raises FileNotFoundError without a config.json, ValueError, naming it, for one that can't be read.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: is this a checkpoint of transformers?")
    data = read_json(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path} is {brief(data)}, expected a mapping: download it again")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError):
        raise
    except Exception as error:  # transformers has its own for a field of the wrong type
        raise ValueError(f"{path} can't be read ({type(error).__name__}: {brief(str(error))})") from error


def _config(folder: Path) -> Any:
    if (folder / "adapter_config.json").is_file():  # transformers would load the model that it names
        raise ValueError(f"{folder} holds an adapter: merge it into its base model, then convert that")
    return read_config(folder)


def _has_weights(folder: Path) -> bool:
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def _check_tokenizer(folder: Path, files: tuple[Path, ...]) -> None:
    there = [file for file in TOKENIZER_FILES if Path(file) in files]
    if not there:
        return
    try:
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # each tokenizer library has its own
        raise ValueError(
            f"{folder / there[0]}: the tokenizer can't be read ({type(error).__name__}: {error}). Download "
            f"{', '.join(there)} again, or move them away to convert without a tokenizer"
        ) from error
