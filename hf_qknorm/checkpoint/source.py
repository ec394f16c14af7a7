"""Where a checkpoint comes from: a folder or a Hub name, looked through before anything is written."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel

from hf_qknorm.checkpoint.complete import NORM, check_complete
from hf_qknorm.checkpoint.safetensors_files import Weights
from hf_qknorm.checkpoint.unchanged import Stamp, check_unchanged, stamps
from hf_qknorm.families.class_names import PREFIX, TYPE_PREFIX
from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.hub_names import hub_token, is_path
from hf_qknorm.files.names import FOLDERS, INDEX, REPORT, SINGLE, TOKENIZER_FILES
from hf_qknorm.files.paths import user_path
from hf_qknorm.files.untrusted import read_json
from hf_qknorm.model.derived import derived_model
from hf_qknorm.model.norms import eps_problem
from hf_qknorm.model.settings import check_settings, describe

logger = logging.getLogger(__name__)
HTTPError: Any = HfHubHTTPError.__bases__[0]  # of httpx, whichever of its versions the Hub's client is built on
# Other forms of the weights, and what a Trainer leaves: they do not belong to the converted model.
LEFT_SUFFIXES = (
    ".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".onnx", ".ot", ".pickle", ".pkl", ".pt", ".pth",
    ".safetensors", ".tflite",
)  # fmt: skip
LEFT_NAMES = ("config.json", "trainer_state.json", REPORT)
LEFT_INDEX = re.compile(r".+\.index(\.[\w-]+)?\.json")  # of weights in any form, or of a variant such as fp16
TOKENIZER_BYTES = 512 * 2**20  # the largest have some 30 MB
MAPPINGS = ("generation_config.json", "tokenizer_config.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")  # transformers prefers these to all others


@dataclass(frozen=True)
class Source:
    """A checkpoint: the name it was asked for by, its folder, its config, its weights, and the files that travel.

    `unread` are the safetensors files in the folder that are not read, as transformers does not; `stamps` tell of each
    file that is read whether it is still the same.
    """

    name: str
    folder: Path
    config: Any
    weights: Weights
    files: tuple[Path, ...]  # relative to the folder
    unread: tuple[str, ...]
    stamps: Mapping[str, Stamp]

    @property
    def model_class(self) -> Any:
        """The class that its config names. Raises ValueError as `model_class_of` does."""
        return model_class_of(self.config, self.folder)

    def check_complete(self) -> tuple[str, ...]:
        """Check that its weights are all that its model asks for; the names of those that the model does not read.

        Raises ValueError as `hf_qknorm.checkpoint.complete.check_complete` does.
        """
        return check_complete(self.model_class, self.config, self.weights.stored, self.weights.folder)

    def check_gains(self) -> None:
        """Raise ValueError, naming file and tensor, for a gain, bias or knee of a head's norm that can't be right."""
        least = self.config.scheme.eps if hasattr(self.config, "scheme") else torch.finfo(torch.float32).tiny
        for name in filter(NORM.search, self.weights.stored):
            values, where = self.weights.read(name), self.folder / self.weights.stored[name].file
            if not values.float().isfinite().all():
                raise ValueError(
                    f"{where}: {name} holds NaN or infinity, expected finite numbers: the training that wrote it broke "
                    "down. Go back to an earlier checkpoint"
                )
            if name.endswith(".eps") and (problem := eps_problem(values, least)):
                raise ValueError(f"{where}: {name} {problem}")

    def check_unchanged(self) -> None:
        """Raise ValueError, naming the file, if one that was read is no longer what it was when it was opened."""
        check_unchanged(self.folder, self.stamps)


def model_class_of(config: Any, folder: Path) -> Any:
    """The class that a checkpoint's config names: of transformers, or for a patched checkpoint derived from that.

    Raises ValueError, naming config.json, for one that transformers does not have.
    """
    architectures = getattr(config, "architectures", None) or []
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    patched = config.model_type.startswith(TYPE_PREFIX)
    found: Any = getattr(transformers, named.removeprefix(PREFIX), None) if isinstance(named, str) else None
    is_model = isinstance(found, type) and issubclass(found, PreTrainedModel)
    if is_model and found.config_class is not None:
        return derived_model(found) if patched else found
    example = f"{PREFIX if patched else ''}LlamaForCausalLM"
    raise ValueError(
        f'{folder / "config.json"}: "architectures" is {shorten(architectures or "missing")}, expected the name of a '
        f'class of transformers for model_type {shorten(config.model_type)}, as ["{example}"] for a Llama'
    )


@contextmanager
def open_source(name: str | Path, *, allow_pickle: bool = False) -> Iterator[Source]:
    """Open a checkpoint by folder or Hub name and check it; pickled weights are read only where that is allowed.

    Raises FileNotFoundError for a folder or a file that is not there, and ValueError, naming the file, for one that is
    corrupted, for a tokenizer that can't be read, and for weights that are pickled, or an adapter.
    """
    folder = _folder(str(name), allow_pickle)
    before = stamps(folder, _names(folder))
    config = _config(folder)
    files = travelling_files(folder)
    _check_tokenizer(folder, files)
    with _weights(folder, config, allow_pickle) as weights:
        read = {"config.json", "adapter_config.json", REPORT, SINGLE, INDEX, *weights.files, *map(str, files)}
        read |= {name for name in before if name.startswith(PICKLED[0].removesuffix(".bin"))} if allow_pickle else set()
        unread = _unread(folder, weights)
        source = Source(str(name), folder, config, weights, files, unread, {name: before.get(name) for name in read})
        try:
            yield source
        except Exception:
            source.check_unchanged()  # where it changed, the error may only tell of a consequence
            raise


@contextmanager
def _weights(folder: Path, config: Any, allow_pickle: bool) -> Iterator[Weights]:
    """The weights that transformers would load; of pickled ones, a copy as safetensors."""
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
    yield from _unpickled(folder, config)


def _unpickled(folder: Path, config: Any) -> Iterator[Weights]:
    """Pickled weights, saved as safetensors in a temporary folder. Raises ValueError for those that are not whole."""
    model_class = model_class_of(config, folder)
    how = {"use_safetensors": False, "weights_only": True, "ignore_mismatched_sizes": True}
    with TemporaryDirectory(prefix="hf-qknorm-") as staged:
        model, info = model_class.from_pretrained(folder, dtype="auto", output_loading_info=True, **how)
        wrong = dict.fromkeys(info["missing_keys"], "are missing")
        wrong |= {key: f"have shape {list(got)}, expected {list(asked)}" for key, got, asked in info["mismatched_keys"]}
        for key, what in sorted(wrong.items()):  # transformers made up its values, and would save them
            raise ValueError(
                f"{folder}: in the pickled weights, the values of {key} {what}, as {folder / 'config.json'} asks for "
                f"({model_class.__name__}). Is the download complete?"
            )
        model.save_pretrained(staged)
        yield Weights(Path(staged))


def _check_preferred(folder: Path, config: Any) -> None:
    """Raise ValueError where transformers would read other files than those of the usual names."""
    named = getattr(config, "transformers_weights", None)
    if named not in (None, SINGLE if (folder / SINGLE).is_file() else INDEX):
        raise ValueError(
            f'{folder / "config.json"}: "transformers_weights" is {shorten(named)}, which is not read here: '
            f"remove it, and name the weights {SINGLE}, or their index {INDEX}"
        )
    sharded = sorted(path.name for path in folder.iterdir() if DISTRIBUTED.fullmatch(path.name))
    if sharded:
        raise ValueError(
            f"{folder / sharded[0]} is of a distributed checkpoint, which transformers reads before all others: load "
            "it, and save it with save_pretrained to a new folder"
        )


def _unread(folder: Path, weights: Weights) -> tuple[str, ...]:
    """The safetensors files of a folder that are not read; a warning, where an index is among them."""
    own = weights.files if weights.folder == folder else []
    unread = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in own)
    if weights.index is None and (folder / INDEX).is_file():
        unread.append(INDEX)
        logger.warning(
            "%s holds weights twice: %s is read, as transformers does, and these are not: %s. Remove them",
            folder, SINGLE, ", ".join(unread),
        )  # fmt: skip
    return tuple(unread)


def _names(folder: Path) -> list[str]:
    """The files of a folder that may be read, relative to it."""
    places = [folder, *(folder / name for name in FOLDERS if (folder / name).is_dir())]
    return [str(path.relative_to(folder)) for place in places for path in place.iterdir() if not path.is_dir()]


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
            path.name.startswith(".")
            or path.suffix in LEFT_SUFFIXES
            or path.name in LEFT_NAMES
            or LEFT_INDEX.fullmatch(path.name)
        ):
            files.append(Path(path.name))
    for file in files:
        _check_place(folder, file)
        if file.suffix == ".json":
            data = read_json(folder / file, TOKENIZER_BYTES)
            if file.name in MAPPINGS and not isinstance(data, dict):
                raise ValueError(f"{folder / file} is {shorten(data)}, expected a mapping: download it again")
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
        raise ValueError(f"{path} is {shorten(data)}, expected a mapping: download it again")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        check_settings(config)
        return config
    except Exception as error:  # transformers has its own for a field of the wrong type
        if isinstance(error, OSError) or (isinstance(error, ValueError) and "config.json" in str(error)):
            raise
        raise ValueError(f"{path} can't be read ({describe(error)})") from error


def check_readable(written: Path, source: Path) -> None:
    """Raise ValueError, naming the file of `source` to mend, unless transformers reads the settings in `written`."""
    for name, read in (("config.json", read_config), ("generation_config.json", GenerationConfig.from_pretrained)):
        if not (written / name).is_file():
            continue
        try:
            read(written)
        except Exception as error:  # a setting can be wrong in any way
            cause = describe(error).replace(str(written), "the result")
            raise ValueError(f"{source / name}: a checkpoint with these settings does not load ({cause})") from error


def _config(folder: Path) -> Any:
    if (folder / "adapter_config.json").is_file():  # transformers would load the model that it names
        raise ValueError(f"{folder} holds an adapter: merge it into its base model, then convert that")
    return read_config(folder)


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
