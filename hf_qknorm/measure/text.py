"""Text for calibration and training: from files or the Hub to batches of tokens `[B, T]`."""

from __future__ import annotations

import errno
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_qknorm.checkpoint import load_tokenizer
from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.hub_names import check_repo_id, hub_token, is_path
from hf_qknorm.files.paths import user_path
from hf_qknorm.files.untrusted import read_start
from hf_qknorm.measure.regroup import token_count

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".csv")
INPUTS = ("input_ids", "pixel_values")  # of the models that calibrate takes
IGNORED = -100  # the label of a token that a masked language model does not predict
MIN_TARGETS = 16  # tokens to predict: fewer do not show how a model predicts
CHARACTERS = 16  # read per token that is asked for: more than tokens have
LENGTH, LEARNED_LENGTH = 256, 1024  # tokens in a sequence by default, and at most where positions are learned

T = TypeVar("T")


def load_text(source: str | None = None, limit: int = 4_000_000) -> str:
    """Up to `limit` characters from a file, a folder of text files, or a Hub dataset (its "train" split).

    None stands for the source files of Python's standard library, which every machine has. A dataset is read by the
    `datasets` package, from its column "text" or else its first column of strings.

    Raises FileNotFoundError for a path that does not exist, ValueError for a source without text, or in no UTF-8.
    """
    paths = _paths(source)
    parts = _dataset_texts(str(source)) if paths is None else map(partial(read_start, limit=limit), paths)
    text = "\n".join(_up_to(limit, parts))[:limit]
    if paths is not None and not text.strip():
        raise ValueError(f"{source}: no text in it (looked for files ending in {', '.join(TEXT_SUFFIXES)})")
    return text


def check_text(source: str | None) -> None:
    """Raise what `load_text` raises for a source that does not exist or has no text; reads little of it."""
    if _paths(source) is None:
        _datasets(str(source))
    else:
        load_text(source, limit=1000)


def _paths(source: str | None) -> list[Path] | None:
    """The files of a source; None for the name of a dataset."""
    if source is None:
        return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    path = user_path(source, "the text's source")
    try:
        if path.is_file():
            return [path]
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise ValueError(
            f"{shorten(source)} names no file, folder or dataset: give text in a list, as [text]"
        ) from None
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
    if is_path(source) or path.suffix in TEXT_SUFFIXES or os.path.lexists(path):
        raise FileNotFoundError(f"no such file or folder: {source}")
    return None


def _datasets(name: str) -> Any:
    """The package `datasets`. Raises ImportError without it, ValueError if `name` can't be a dataset's."""
    check_repo_id(name, "the text's source", "a file, a folder, or the name of a dataset on the Hub, as OWNER/NAME")
    hub_token()  # raises for a malformed one, which every request would send
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{name!r} is no file or folder here; to load it as a Hub dataset: pip install datasets"
        ) from error
    return datasets


def _dataset_texts(name: str) -> Iterator[str]:
    datasets = _datasets(name)
    try:
        yield from map(_row_text, datasets.load_dataset(name, split="train", streaming=True))
    except (OSError, ValueError) as error:
        raise ValueError(f"{name!r} is no file or folder here, and no readable dataset on the Hub: {error}") from error


def tokenize(tokenizer: Any, text: str) -> Tensor:
    """The token ids of a text, `[N]`. Raises ValueError for a tokenizer that fails or returns no tokens."""
    where = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    try:
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)
    except Exception as error:  # the libraries of tokenizers share no base class
        raise ValueError(
            f"{where}: the tokenizer can't read the text ({shorten(str(error))}): restore its files"
        ) from error
    if text and not len(ids):
        raise ValueError(f"{where}: the tokenizer gives no tokens for {len(text):,} characters: restore its files")
    return ids


def sample_batches(ids: Tensor, count: int, batch: int, length: int, seed: int) -> list[Tensor]:
    """`count` batches `[batch, length]` from random places of ids `[N]`, reproducible by `seed`."""
    if len(ids) < length + 2:
        raise ValueError(
            f"need more than {length + 1} tokens for sequences of {length}, got {len(ids)}: give more text"
        )
    generator = torch.Generator().manual_seed(seed)
    places = (torch.randint(len(ids) - length - 1, (batch,), generator=generator) for _ in range(count))
    return [torch.stack([ids[i : i + length] for i in starts.tolist()]) for starts in places]


def context_length(config: Any) -> int | None:
    """The length of the longest sequence that a model with this config is for; None if the config has none."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or None


def sequence_length(config: Any, length: int | None) -> int:
    """Return `length`, or the default. Raises ValueError for one under 2, or beyond learned positions."""
    if length is None:
        return default_length(config)
    context = context_length(config) if _learns_positions(config) else None
    if length < 2 or (context and length > context):
        limit = f"2 to {context}, the model's learned positions" if context else "2 or more"
        raise ValueError(f"length={length}: expected {limit}")
    return length


def default_length(config: Any) -> int:
    """The default length of sequences: 256, or the number of positions if that is smaller.

    Where positions are learned, queries and keys depend on them: the length is half of the positions, at most 1024.
    """
    positions = getattr(config, "max_position_embeddings", None) or LENGTH
    longest = max(LENGTH, min(positions // 2, LEARNED_LENGTH)) if _learns_positions(config) else LENGTH
    return min(positions, longest)


def _learns_positions(config: Any) -> bool:
    return getattr(config, "rope_parameters", None) is None


def batches_for(
    model: PreTrainedModel,
    data: Any,
    tokenizer: Any,
    *,
    batch: int,
    length: int | None,
    max_tokens: int,
    labels: bool = False,
) -> list[dict[str, Tensor]]:
    """`as_batches` with the model's default length and, for `tokenizer=None`, the tokenizer of its checkpoint."""

    def load() -> Any:
        if tokenizer is None and not model.name_or_path:
            raise ValueError("text needs a tokenizer, and this model has no name to load one by: pass tokenizer=")
        return load_tokenizer(model.name_or_path) if tokenizer is None else tokenizer

    length = sequence_length(model.config, length)
    return list(as_batches(data, load, batch=batch, length=length, max_tokens=max_tokens, labels=labels))


def as_batches(
    data: Any, load_tokenizer: Callable[[], Any], *, batch: int, length: int, max_tokens: int, labels: bool = False
) -> Iterator[dict[str, Tensor]]:
    """Batches of "input_ids" `[B, T]`, and "attention_mask" if `data` has it, of up to about `max_tokens` tokens.

    Batches of images, mappings with "pixel_values" `[B, C, H, W]`, are kept up to about `max_tokens` images. With
    `labels`, batches also keep their "labels", of masked tokens.

    `data` is a source for `load_text`, a `datasets.Dataset`, or an iterable of strings, of rows (mappings with a text,
    or with "input_ids" `[N]`), or of batches (tensors `[B, T]`, or mappings with them). One mapping is one item.
    Strings and rows, without their padding, are joined and cut into sequences of `length`, `batch` at a time; batches
    are kept. Items that are not needed are not read.

    Raises ValueError for empty data and for anything else.
    """
    if isinstance(data, str | Path):
        data = [load_text(str(data), limit=CHARACTERS * max_tokens)]
    elif isinstance(data, Mapping):  # its items would be its keys
        if not {"input_ids", "pixel_values"} & data.keys() and not any(isinstance(x, str) for x in data.values()):
            raise ValueError(f"the calibration data is a mapping of {', '.join(map(str, data))}: give a value of it")
        data = [data]
    for name, value in (("batch_size", batch), ("max_tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name}={value}: expected at least 1")
    items = iter(data)
    first = next(items, None)
    if first is None:
        raise ValueError("the calibration data is empty: give texts, or batches with input_ids")
    items = chain([first], items)
    if _is_batch(first):
        kept = (*INPUTS, "attention_mask", *["labels"] * labels)
        yield from _up_to(max_tokens, map(partial(_batch_inputs, kept=kept), items), size=token_count)
        return
    ids = _joined_ids(items, load_tokenizer, max_tokens)
    whole = ids[: len(ids) // length * length].view(-1, length)
    for rows in torch.split(whole, batch) if len(whole) else [ids[None]]:
        yield {"input_ids": rows}


def longest_sequence(batches: Sequence[Mapping[str, Tensor]]) -> int:
    """The number of tokens of the longest sequence, padding included; 0 for images."""
    return max((batch["input_ids"].shape[1] for batch in batches if "input_ids" in batch), default=0)


def check_batches(batches: Sequence[Mapping[str, Tensor]], config: Any) -> None:
    """Raise ValueError for batches with too few tokens to predict, or with tokens outside of the model's vocabulary.

    A token counts if it follows another one in its sequence, and neither is padding; with labels, if it has one. Images
    are not checked.
    """
    if any("pixel_values" in batch for batch in batches):
        return
    targets = 0
    for batch in batches:
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        counted = batch["labels"] != IGNORED if "labels" in batch else real[:, 1:] & real[:, :-1]
        targets += int(counted.sum())
    if targets < MIN_TARGETS:
        raise ValueError(
            f"the text gives {targets} tokens to predict, expected at least {MIN_TARGETS}: give more text, or a "
            "larger max_tokens (--max-tokens). (Or the model's max_position_embeddings leaves no room for them)"
        )
    size = getattr(config.get_text_config(), "vocab_size", None)
    limits = [batch["input_ids"].aminmax() for batch in batches if batch["input_ids"].numel()]
    for token in (min(int(least) for least, _ in limits), max(int(most) for _, most in limits)):
        if token < 0 or (size is not None and token >= size):
            raise ValueError(
                f"the text holds the token {token}, and the model has {size}, from 0 on: is this its tokenizer?"
            )


def _is_batch(item: Any) -> bool:
    if isinstance(item, Mapping) and "pixel_values" in item:
        return True
    ids = item.get("input_ids") if isinstance(item, Mapping) else item
    return (isinstance(ids, Tensor) and ids.dim() == 2) or (
        isinstance(ids, list) and isinstance(next(iter(ids), None), list)
    )


def _batch_inputs(item: Any, kept: Sequence[str]) -> dict[str, Tensor]:
    if not _is_batch(item):
        raise ValueError(f"a batch must be a tensor [B, T] or a mapping with input_ids, got {type(item).__name__}")
    inputs = item if isinstance(item, Mapping) else {"input_ids": item}
    return {key: torch.as_tensor(inputs[key]) for key in kept if inputs.get(key) is not None}


def _joined_ids(items: Iterable[Any], load_tokenizer: Callable[[], Any], max_tokens: int) -> Tensor:
    """The token ids of strings or rows, concatenated, `[N]`."""
    tokenizer = cache(load_tokenizer)  # loaded for the first text, and once

    def ids_of(item: Any) -> Tensor:
        row = item if isinstance(item, Mapping) else {"input_ids": item if isinstance(item, Tensor) else None}
        if row.get("input_ids") is not None:
            ids = torch.as_tensor(row["input_ids"], dtype=torch.long).flatten()
            mask = row.get("attention_mask")
            return ids if mask is None else ids[torch.as_tensor(mask).flatten().bool()]
        text = item if isinstance(item, str) else _row_text(item)
        return tokenize(tokenizer(), text)

    return torch.cat(list(_up_to(max_tokens, map(ids_of, items))))[:max_tokens]


def _row_text(row: Any) -> str:
    """The text of a dataset's row: its column "text", or else its first column of strings."""
    if not isinstance(row, Mapping):
        raise ValueError(
            f"expected strings, rows with a text or input_ids, or batches [B, T], got {type(row).__name__}"
        )
    column = "text" if "text" in row else next((key for key, value in row.items() if isinstance(value, str)), None)
    if column is None:
        raise ValueError(f"a row has no column of text, only {', '.join(row)}")
    text: str = row[column]
    return text


def _up_to(limit: int, parts: Iterable[T], size: Callable[[T], int] = len) -> Iterator[T]:  # type: ignore[assignment]
    """The parts up to the one with which their sizes add up to `limit`; later ones are not read."""
    total = 0
    for part in parts:
        yield part
        total += size(part)
        if total >= limit:
            return
