"""A source checkpoint, opened from a folder or the Hub and checked before anything is written."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from torch import Tensor
from transformers.modeling_utils import load_state_dict

from hf_qknorm.checkpoint.complete import NORM, check_complete
from hf_qknorm.checkpoint.config import model_class_of, read_config
from hf_qknorm.checkpoint.copied_files import WEIGHT_SUFFIXES, copied_files, file_names
from hf_qknorm.checkpoint.safetensors_files import INDEX_BYTES, Weights
from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.hub_names import hub_token, is_path
from hf_qknorm.files.names import CONFIG, INDEX, REPORT, SINGLE
from hf_qknorm.files.paths import user_path
from hf_qknorm.files.untrusted import read_json
from hf_qknorm.model.norms import shape_problem

logger = logging.getLogger(__name__)
HTTPError: Any = HfHubHTTPError.__bases__[0]  # of the httpx version that the Hub's client uses
ADAPTER = "adapter_config.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")  # transformers prefers these to all others


@dataclass(frozen=True)
class Source:
    """An open checkpoint.

    `name` is the given folder or Hub name, `files` are those to copy (relative to `folder`), `unread` are safetensors
    files of the folder that transformers does not read, and `fingerprints` belong to the files that are read.
    """

    name: str
    folder: Path
    config: Any
    weights: Weights
    files: tuple[Path, ...]
    unread: tuple[str, ...]
    fingerprints: Mapping[str, tuple[int, ...]]

    @property
    def model_class(self) -> Any:
        """The class that the config names. Raises ValueError as `model_class_of` does."""
        return model_class_of(self.config, self.folder)

    def check_complete(self) -> tuple[str, ...]:
        """Check the weights against the model, as `hf_qknorm.checkpoint.complete.check_complete` does."""
        return check_complete(self.model_class, self.config, self.weights.stored, self.weights.folder)

    def check_gains(self) -> None:
        """Raise ValueError, naming file and tensor, for an impossible gain, bias or knee of a head's norm."""
        for name in filter(NORM.search, self.weights.stored):
            values, where = self.weights.read(name), self.folder / self.weights.stored[name].file
            if not values.float().isfinite().all():
                raise ValueError(
                    f"{where}: {name} holds NaN or infinity, expected finite numbers: the training that wrote it "
                    "diverged. Go back to an earlier checkpoint"
                )
            if name.endswith(".knee") and (problem := shape_problem(values)):
                raise ValueError(f"{where}: {name} {problem}")

    def stored_name(self, model: Any, name: str) -> str:
        """Return the name in the weights of the patched model's attention layer `name`: the base prefix may differ.

        Raises ValueError if its projections are not stored under that name.
        """
        parts, start = model.get_submodule(name).family.style.weights, f"{model.base_model_prefix}."
        for candidate in (name, name.removeprefix(start), start + name):
            if all(f"{candidate}.{part}.weight" in self.weights for part in parts):
                return candidate
        raise ValueError(
            f"{self.weights.folder}: {name}.{parts[0]}.weight is not stored under that name: transformers renames, "
            "splits or shares tensors when it loads this model, which no change of files repeats. Load the model, and "
            "call patch_model and save_pretrained; in place of an export, remove_norms and save_pretrained"
        )

    def check_unchanged(self) -> None:
        """Raise ValueError, naming the file, if another process has changed a file since the checkpoint was opened."""
        for name, fingerprint in self.fingerprints.items():
            if _fingerprint(self.folder / name) != fingerprint:
                raise ValueError(
                    f"{self.folder / name} changed while it was read, so that the data may be of two checkpoints: "
                    "nothing was written. Try again when nothing else writes there"
                )


def _fingerprint(path: Path) -> tuple[int, ...]:
    """Return a file's device, inode, size, and time of the last change in ns; of a link, its target's; () without."""
    with suppress(FileNotFoundError, NotADirectoryError):
        found = os.stat(path)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    return ()


@contextmanager
def open_source(name: str | Path, *, allow_pickle: bool = False) -> Iterator[Source]:
    """Open and check a checkpoint in a folder or on the Hub; pickled weights are read with `allow_pickle` only.

    Raises FileNotFoundError for a missing folder or file; ValueError, naming the file, for a damaged file or tokenizer,
    pickled weights, or an adapter; OSError if the download fails.
    """
    folder = _folder(str(name), allow_pickle)
    before = {str(name): _fingerprint(folder / name) for name in file_names(folder)}
    if (folder / ADAPTER).is_file():  # transformers would load the base model that it names
        raise ValueError(f"{folder} holds an adapter: merge it into its base model, then convert that")
    config = read_config(folder)
    files = copied_files(folder)
    with _open_weights(folder, config, allow_pickle) as weights:
        read = {CONFIG, ADAPTER, REPORT, SINGLE, INDEX, *weights.files, *map(str, files)}
        read |= {name for name in before if name.startswith(PICKLED[0].removesuffix(".bin"))} if allow_pickle else set()
        fingerprints = {file: before.get(file, ()) for file in read}
        source = Source(str(name), folder, config, weights, files, _unread(folder, weights), fingerprints)
        try:
            yield source
        except Exception:
            source.check_unchanged()  # a change of the files explains the error better
            raise


@contextmanager
def _open_weights(folder: Path, config: Any, allow_pickle: bool) -> Iterator[Weights]:
    """Yield the weights that transformers would load; of pickled weights, a copy as safetensors."""
    _check_preferred(folder, config)
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        yield Weights(folder)
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
        _save_unpickled(folder, config, Path(staged))
        yield Weights(Path(staged))


def _save_unpickled(folder: Path, config: Any, target: Path) -> None:
    """Save pickled weights as safetensors.

    Raises ValueError for files that can't be read, and for tensors that are missing or of another shape.
    """
    model_class = model_class_of(config, folder)
    how = {"use_safetensors": False, "weights_only": True, "ignore_mismatched_sizes": True}
    try:
        model, info = model_class.from_pretrained(folder, dtype="auto", output_loading_info=True, **how)
    except Exception:  # of many types, which name no file
        _check_pickles(folder)
        raise
    wrong = dict.fromkeys(info["missing_keys"], "are missing")
    wrong |= {key: f"have shape {list(got)}, expected {list(asked)}" for key, got, asked in info["mismatched_keys"]}
    for key, problem in sorted(wrong.items()):  # transformers filled in random values, and would save them
        raise ValueError(
            f"{folder}: in the pickled weights, the values of {key} {problem}, as {folder / CONFIG} asks for "
            f"({model_class.__name__}). Is the download complete?"
        )
    model.save_pretrained(target)


def _check_pickles(folder: Path) -> None:
    """Raise ValueError, naming the file, for pickled weights, or an index of them, that can't be read."""
    single, index = (folder / name for name in PICKLED)
    files = [single]
    if not single.is_file():
        data = read_json(index, INDEX_BYTES)
        for key in ("metadata", "weight_map"):
            if not isinstance(data, dict) or not isinstance(data.get(key), dict):
                raise ValueError(
                    f'{index} has no mapping "{key}", without which transformers does not load it: download it again'
                )
        files = [folder / name for name in sorted({str(name) for name in data["weight_map"].values()})]
    for file in files:
        if not _is_state_dict(file):
            raise ValueError(
                f"{file} is truncated or corrupted, or holds other things than tensors: download it again, or look for "
                "a safetensors version"
            ) from None  # torch's error advises to let the file run its code


def _is_state_dict(file: Path) -> bool:
    try:
        data: Any = load_state_dict(file, map_location="meta")
    except OSError:  # names the file
        raise
    except Exception:  # torch raises various types
        return False
    return isinstance(data, dict) and all(isinstance(value, Tensor) for value in data.values())


def _check_preferred(folder: Path, config: Any) -> None:
    """Raise ValueError where transformers would read weights under other names than the usual ones."""
    named = getattr(config, "transformers_weights", None)
    if named not in (None, SINGLE if (folder / SINGLE).is_file() else INDEX):
        raise ValueError(
            f'{folder / CONFIG}: "transformers_weights" is {shorten(named)}, which is not read here: remove it, and '
            f"name the weights {SINGLE}, or their index {INDEX}"
        )
    if sharded := sorted(path.name for path in folder.iterdir() if DISTRIBUTED.fullmatch(path.name)):
        raise ValueError(
            f"{folder / sharded[0]} is of a distributed checkpoint, which transformers reads before all others: load "
            "it, and save it with save_pretrained to a new folder"
        )


def _unread(folder: Path, weights: Weights) -> tuple[str, ...]:
    """Return the safetensors files of a folder that are not read; log a warning if an index is among them."""
    own = weights.files if weights.folder == folder else []
    unread = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in own)
    if weights.index is None and (folder / INDEX).is_file():
        unread.append(INDEX)
        logger.warning(
            "%s holds weights twice: %s is read, as transformers does, and these are not: %s. Remove them",
            folder, SINGLE, ", ".join(unread),
        )  # fmt: skip
    return tuple(unread)


def _folder(name: str, allow_pickle: bool) -> Path:
    """Return the folder of a checkpoint, downloaded if `name` is one on the Hub."""
    path = user_path(name, "the source")
    if path.is_dir():
        return path
    if path.exists() or is_path(name):
        raise FileNotFoundError(f"{name} is no folder: expected one with a checkpoint, or the name of one on the Hub")
    hub_token()  # each request sends it
    wanted = (".safetensors", ".bin") if allow_pickle else (".safetensors",)
    unwanted = [f"*{suffix}" for suffix in WEIGHT_SUFFIXES if suffix not in wanted]
    try:
        return Path(snapshot_download(name, ignore_patterns=[*unwanted, "original/*", "onnx/*"]))
    except (OSError, HTTPError) as error:
        message = getattr(error, "server_message", None) or str(error).strip().partition("\n")[0]
        raise OSError(
            f"{name} is no folder here, and the download from the Hub failed ({message}): check the name and the "
            "network, and log in (`hf auth login`) if it is private"
        ) from error
