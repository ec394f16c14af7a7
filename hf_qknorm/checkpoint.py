"""Checkpoints on the disk: opened and checked by their headers, loaded by transformers, and copied beside the weights.

Only safetensors files are read, and no code of a checkpoint runs.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from hf_qknorm.families.class_names import PREFIX, TYPE_PREFIX
from hf_qknorm.files.atomic_io import replace_text
from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.log import logger
from hf_qknorm.files.names import CARD, CONFIG, GENERATED, INDEX, SINGLE, check_inside, has_tokenizer, side_files
from hf_qknorm.files.paths import is_repo_id, user_path
from hf_qknorm.files.untrusted import load_tokenizer, read_json
from hf_qknorm.model.config_checks import check_settings, describe_error
from hf_qknorm.model.derived import derived_model

HTTPError: Any = HfHubHTTPError.__bases__[0]  # of the httpx version that the Hub's client uses
DOWNLOADED: Final = (
    "*.safetensors", "*.json", "*.txt", "*.model", "*.spm", "*.tiktoken", "*.jinja", "*.md", "LICEN*", "licen*",
    "NOTICE*", "COPYING*", "USE_POLICY*",
)  # fmt: skip
READ: Final = 64  # elements at most of a tensor whose values are checked, as a knee's: larger ones have shapes alone
NORM: Final = re.compile(r"(?:^|\.)(?:[qkv]|query|key|value)_(?:layer)?norm\.[^.]+$")  # of heads, in an attention layer
# The class of most tokenizers, whose name before transformers 5 every version knows, and the one that only Mistral's
# own package has.
GENERAL: Final = ("TokenizersBackend", "MistralCommonBackend")


@dataclass(frozen=True)
class Source:
    """A checkpoint: the folder or Hub name that was given, its folder, its config, and the class that this names.

    `model` is its model on the meta device. It is None for a quantised one, whose quantiser decides on the tensors.
    """

    name: str
    folder: Path
    config: Any
    model_class: Any
    model: Any = None


def open_source(name: str | Path) -> Source:
    """Open a checkpoint in a folder or on the Hub, and compare the headers of its weights with its config.

    Raises FileNotFoundError for a missing folder or file, and for weights that are only pickled; ValueError, naming the
    file, for a config that can't be read, an adapter, and weights that are damaged, outside the folder, missing, or of
    another shape than the config asks for; OSError if the download fails.
    """
    folder = _folder(str(name))
    if (folder / "adapter_config.json").is_file():  # transformers would load the base model that it names
        raise ValueError(f"{folder} holds an adapter: merge it into its base model, then convert that")
    config = read_config(folder)
    if (generation := folder / "generation_config.json").is_file():
        try:
            GenerationConfig.from_pretrained(folder)
        except Exception as error:  # of various types, which name no file
            raise ValueError(f"{generation} can't be read ({describe_error(error)})") from error
    model_class = model_class_of(config, folder)
    plain = getattr(config, "quantization_config", None) is None
    shapes = _stored(folder, plain=plain)
    source = Source(str(name), folder, config, model_class)
    if not plain:
        return source
    options = {"config": copy.deepcopy(config), "state_dict": shapes, "device_map": "meta"}
    return replace(source, model=_load(source, None, ignore_mismatched_sizes=True, **options))


def read_config(folder: Path) -> Any:
    """Read the config of the checkpoint in a folder; none of its code is run.

    Raises FileNotFoundError without a config.json, ValueError, naming it, for one that can't be read.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: is this a checkpoint of transformers?")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        check_settings(config)
        return config
    except Exception as error:  # transformers raises various types for a wrong field
        if isinstance(error, ValueError) and CONFIG in str(error):
            raise
        raise ValueError(f"{path} can't be read ({describe_error(error)})") from error


def model_class_of(config: Any, folder: Path) -> Any:
    """Return the class that a config names: one of transformers, or for a patched checkpoint its derived class.

    Raises ValueError, naming config.json, for a class that transformers does not have.
    """
    architectures: list[str] = config.architectures or []  # `read_config` has checked the type
    patched = type(config).model_type.startswith(TYPE_PREFIX)
    found: Any = getattr(transformers, "".join(architectures[:1]).removeprefix(PREFIX), None)
    is_model = isinstance(found, type) and issubclass(found, PreTrainedModel)
    if is_model and found.config_class is not None:
        return derived_model(found) if patched else found
    example = f"{PREFIX if patched else ''}LlamaForCausalLM"
    raise ValueError(
        f'{folder / CONFIG}: "architectures" is {shorten(architectures or "missing")}, expected the name of a class of '
        f'transformers for model_type {shorten(config.model_type)}, as ["{example}"] for a Llama'
    )


def load_model(source: Source, **options: Any) -> Any:
    """Load the model of a checkpoint, in the dtype of its config; `options` are those of `from_pretrained`.

    Raises ValueError for weights that can't be loaded.
    """
    return _load(source, source.folder, **{"dtype": "auto", "use_safetensors": True, **options})


def load_causal(source: Source, **options: Any) -> Any:
    """`load_model` for a model that predicts tokens. Raises ValueError for one with another head, or none."""
    if source.model is not None and source.model.get_output_embeddings() is None:
        raise ValueError(
            f"{source.folder / CONFIG}: the checkpoint is a {source.model_class.__name__}, which predicts no tokens to "
            "measure: give a causal language model"
        )
    model = load_model(source, **options)
    model.name_or_path = source.name
    return model


def copied_files(source: Source) -> list[Path]:
    """Return the files of a checkpoint that its conversion copies: tokenizer, processor, templates, licence, card."""
    return [file for file in side_files(source.folder) if file.name not in GENERATED]


def copy_files(source: Source, target: Path, *, card: bool = True) -> None:
    """Copy the files beside a checkpoint's weights into the folder `target`; a tokenizer keeps its class.

    Raises ValueError for links out of the folder and for a tokenizer that can't be loaded.
    """
    for name in copied_files(source):
        if card or name.name != CARD:
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source.folder / name, target / name)
    keep_tokenizer_class(source.folder, target)


def keep_tokenizer_class(folder: Path, target: Path) -> None:
    """Name the class of a folder's tokenizer in the config of its copy in `target`, unless that has it.

    transformers selects the class of a tokenizer by the model type if its config names none, and for some types if it
    names one. The copy belongs to another model type, and another class would split text differently.
    """
    if not has_tokenizer(target):
        return
    found, path = type(load_tokenizer(folder)).__name__, target / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    known = "PreTrainedTokenizerFast" if found in GENERAL else found
    stated, own = str(settings.get("tokenizer_class")), settings.pop("auto_map", None)  # code is not copied
    if own is not None or stated.removesuffix("Fast") not in (found, known.removesuffix("Fast")):
        replace_text(path, json.dumps(settings | {"tokenizer_class": known}, indent=2, ensure_ascii=False) + "\n")


def _folder(name: str) -> Path:
    """Return the folder of a checkpoint, downloaded if `name` is one on the Hub."""
    path = user_path(name, "the source")
    if path.is_dir():
        return path
    if path.exists() or not is_repo_id(name):
        raise FileNotFoundError(f"{name} is no folder: expected one with a checkpoint, or the name of one on the Hub")
    try:
        unwanted = ["original/*", "onnx/*", "consolidated*"]
        return Path(snapshot_download(name, allow_patterns=[*DOWNLOADED], ignore_patterns=unwanted))
    except (OSError, HTTPError) as error:
        message = getattr(error, "server_message", None) or str(error).strip().partition("\n")[0]
        raise OSError(
            f"{name} is no folder here, and the download from the Hub failed ({message}): check the name and the "
            "network, and log in (`hf auth login`) if it is private"
        ) from error


def _stored(folder: Path, *, plain: bool) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name, from the files that transformers reads: large ones as shapes alone.

    Raises FileNotFoundError without weights in safetensors, ValueError, naming the file, for ones that are damaged or
    outside the folder, and in a `plain` checkpoint for quantised ones.
    """
    if (folder / SINGLE).is_file():
        files = [SINGLE]
    elif (folder / INDEX).is_file():
        index = read_json(folder / INDEX)
        named = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(named, dict) or not named:
            raise ValueError(f'{folder / INDEX} has no "weight_map" from tensors to files: download it again')
        files = sorted({str(file) for file in named.values()})
    else:
        raise FileNotFoundError(
            f"{folder} holds no {SINGLE} and no {INDEX}. Pickled weights are not read, because a pickle can run code: "
            "if you trust them, load them with from_pretrained, and save them with save_pretrained"
        )
    found: dict[str, Tensor] = {}
    for file in files:
        if not os.path.isfile(folder / file):  # pathlib's raises for a name that is too long
            raise FileNotFoundError(
                f"{folder / INDEX} names {shorten(file)}, which is missing: download the checkpoint again"
            )
        check_inside(folder, folder / file)
        try:
            with safe_open(folder / file, "pt") as weights:
                for name in weights.keys():  # noqa: SIM118  # a handle, not a mapping
                    shape, dtype = weights.get_slice(name).get_shape(), weights.get_slice(name).get_dtype()
                    if plain and name.endswith(".weight") and dtype not in ("F64", "F32", "F16", "BF16"):
                        raise ValueError(f"{folder / file}: {name} is stored as {dtype}: dequantise it first")
                    small = torch.Size(shape).numel() <= READ
                    found[name] = weights.get_tensor(name) if small else torch.empty(shape, device="meta")
        except SafetensorError as error:
            raise ValueError(
                f"{folder / file} is truncated or corrupted ({shorten(str(error))}): download it again"
            ) from error
    return found


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bars, and its reports on loading."""
    verbosity, shown = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()


def _load(source: Source, place: Path | None, **options: Any) -> Any:
    """Load by the class's `from_pretrained`, and refuse weights that do not fit."""
    named = source.model_class.__name__
    try:
        with quiet_transformers():
            model, info = source.model_class.from_pretrained(place, output_loading_info=True, **options)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers raises various types
        text = str(error) if isinstance(error, ValueError) else describe_error(error)
        if str(source.folder) in text:
            raise
        raise ValueError(f"{source.folder}: {' '.join(text.split())} (the class is {named})") from error
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"{source.folder}: no weights for {missing[0]}{more}, which {CONFIG} asks for ({named}). "
            "transformers would fill in random values. Is the download complete?"
        )
    for name, got, expected in sorted(info["mismatched_keys"]):
        raise ValueError(
            f"{source.folder}: {name} has shape {list(got)}, expected {list(expected)}, as {CONFIG} asks for "
            f"({named}). Restore the {CONFIG} or the weights that belong together"
        )
    if norms := sorted(filter(NORM.search, info["unexpected_keys"])):
        raise ValueError(
            f"{source.folder}: {norms[0]} is the weight of a norm that a {named} does not have, by its "
            f"{CONFIG}. Restore the {CONFIG} that belongs to these weights"
        )
    if (extra := sorted(info["unexpected_keys"])) and place is None:  # once, by the headers
        logger.warning(f"{source.folder}: a {named} has no place for {len(extra)} tensors, and drops {shorten(extra)}")
    return model
