"""Text for calibration and training: where it comes from, and how it becomes batches of tokens `[B, T]`."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.hub_names import check_repo_id, hub_token, is_path

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".csv")
LEAST = 16  # tokens to predict: of fewer, nothing can be said
CHARACTERS = 16  # read for each token asked for: more than tokens have


def load_text(source: str | None = None, limit: int = 4_000_000) -> str:
    """Up to `limit` characters of text: a file, a folder of text files, a Hub dataset's name, or Python's own library.

    None takes the sources of the standard library, which every machine has. A name that is no path is loaded with
    the `datasets` package (its "train" split, the column "text" or the first one of strings).

    Raises FileNotFoundError for a path that is not there, ValueError for a source without text.
    """
    paths = _paths(source)
    return _file_text(source, paths, limit) if paths is not None else _dataset_text(str(source), limit)


def check_text(source: str | None) -> None:
    """Raise what `load_text` raises for a source that is not there or holds no text; of files, a little is read."""
    paths = _paths(source)
    if paths is not None:
        _file_text(source, paths, limit=1000)
    else:
        _datasets(str(source))


def _paths(source: str | None) -> list[Path] | None:
    """The files of a source; None for the name of a dataset."""
    if source is None:
        return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
    if is_path(source) or path.suffix in TEXT_SUFFIXES or os.path.lexists(path):
        raise FileNotFoundError(f"no such file or folder: {source}")
    return None


def _file_text(source: str | None, paths: list[Path], limit: int) -> str:
    parts: list[str] = []
    for path in paths:
        if sum(map(len, parts)) >= limit:
            break
        with path.open(encoding="utf-8", errors="replace") as file:
            parts.append(file.read(min(limit, path.stat().st_size)))  # no more characters than bytes
        if "\0" in parts[-1]:
            raise ValueError(f"{path} is no text in UTF-8: it holds null bytes")
    text = "\n".join(parts)[:limit]
    if not text.strip():
        raise ValueError(f"{source}: no text in it (looked for files ending in {', '.join(TEXT_SUFFIXES)})")
    return text


def _datasets(name: str) -> Any:
    """The package `datasets`, to load the dataset `name`. Raises ImportError without it, ValueError for no name."""
    check_repo_id(name, "the text's source", "a file, a folder, or the name of a dataset on the Hub, as OWNER/NAME")
    hub_token()  # it goes along with each request
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{name!r} is no file or folder here; to load it as a Hub dataset: pip install datasets"
        ) from error
    return datasets


def _dataset_text(name: str, limit: int) -> str:
    datasets = _datasets(name)
    rows = datasets.load_dataset(name, split="train", streaming=True)
    parts: list[str] = []
    size = 0
    for row in rows:
        try:
            parts.append(_text_of(row))
        except ValueError as error:
            raise ValueError(f"the dataset {name!r}: {error}") from None
        size += len(parts[-1])
        if size >= limit:
            break
    return "\n".join(parts)[:limit]


def tokenize(tokenizer: Any, text: str) -> Tensor:
    """The text's token ids, `[N]`. Raises ValueError for a tokenizer that fails, or gives none."""
    where = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    try:
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)
    except Exception as error:  # each tokenizer library has its own
        raise ValueError(
            f"{where}: the tokenizer can't read the text ({shorten(str(error))}): restore its files"
        ) from error
    if text and not len(ids):
        raise ValueError(f"{where}: the tokenizer gives no tokens for {len(text):,} characters: restore its files")
    return ids


def sample_batches(ids: Tensor, count: int, batch: int, length: int, seed: int) -> list[Tensor]:
    """`count` batches `[batch, length]` at random places of ids `[N]`, the same for the same seed."""
    if len(ids) < length + 2:
        raise ValueError(
            f"need more than {length + 1} tokens for sequences of {length}, got {len(ids)}: give more text"
        )
    generator = torch.Generator().manual_seed(seed)
    places = (torch.randint(len(ids) - length - 1, (batch,), generator=generator) for _ in range(count))
    return [torch.stack([ids[i : i + length] for i in starts.tolist()]) for starts in places]


def as_batches(
    data: Any, load_tokenizer: Callable[[], Any], *, batch: int, length: int, max_tokens: int
) -> Iterator[dict[str, Tensor]]:
    """Batches with "input_ids" `[B, T]`, and "attention_mask" where there is one, of up to `max_tokens` tokens.

    `data` is a source that `load_text` knows (a path or a name), a `datasets.Dataset`, or an iterable: of strings, of
    rows (mappings with a text, or with "input_ids" `[N]`), or of batches (tensors `[B, T]`, or mappings with them).
    Strings and rows are joined and cut into sequences of `length`, `batch` at a time; batches stay as they are. It is
    read no further than needed.

    Raises ValueError for data that is empty or none of these.
    """
    if isinstance(data, str | Path):
        data = [load_text(str(data), limit=CHARACTERS * max_tokens)]
    items = iter(data)
    first = next(items, None)
    if first is None:
        raise ValueError("the calibration data is empty: give texts, or batches with input_ids")
    items = chain([first], items)
    if _is_batch(first):
        yield from _whole_batches(items, max_tokens)
        return
    ids = _joined(items, load_tokenizer, max_tokens)
    whole = ids[: len(ids) // length * length].view(-1, length)
    for rows in torch.split(whole, batch) if len(whole) else [ids[None]]:
        yield {"input_ids": rows}


def regrouped(batches: Sequence[Mapping[str, Tensor]], most: int, least: int = 8) -> list[dict[str, Tensor]]:
    """The sequences of these batches in the same order, up to `most` in a batch, and in `least` batches or more.

    Sequences of other lengths, or with other inputs, are not put into one batch.
    """
    most = min(most, max(sum(len(batch["input_ids"]) for batch in batches) // least, 1))
    found: list[dict[str, Tensor]] = []
    for _, run in groupby(batches, key=lambda batch: (batch["input_ids"].shape[1], sorted(batch))):
        alike = list(run)
        parts = {key: torch.split(torch.cat([batch[key] for batch in alike]), most) for key in alike[0]}
        found += [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
    return found


def check_batches(batches: Sequence[Mapping[str, Tensor]], config: Any) -> None:
    """Raise ValueError for batches `[B, T]` too small to judge a model by, or with tokens that it does not have.

    Counted are the tokens that follow another, padding left out: each of them is predicted once.
    """
    predicted = 0
    for batch in batches:
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        predicted += int((real[:, 1:] & real[:, :-1]).sum())
    if predicted < LEAST:
        raise ValueError(
            f"the text gives {predicted} tokens to predict, expected at least {LEAST}: give more text. (Or the model's "
            "max_position_embeddings leaves no room for them)"
        )
    size = getattr(config.get_text_config(), "vocab_size", None)
    largest = max(int(batch["input_ids"].max()) for batch in batches if batch["input_ids"].numel())
    if size is not None and largest >= size:
        raise ValueError(
            f"the text holds the token {largest}, and the model has {size}, from 0 on: is this its tokenizer?"
        )


def _is_batch(item: Any) -> bool:
    ids = item.get("input_ids") if isinstance(item, Mapping) else item
    return (isinstance(ids, Tensor) and ids.dim() == 2) or (isinstance(ids, list) and isinstance(ids[0], list))


def _whole_batches(items: Iterable[Any], max_tokens: int) -> Iterator[dict[str, Tensor]]:
    seen = 0
    for item in items:
        if not _is_batch(item):
            raise ValueError(f"a batch must be a tensor [B, T] or a mapping with input_ids, got {type(item).__name__}")
        inputs = item if isinstance(item, Mapping) else {"input_ids": item}
        result = {key: torch.as_tensor(inputs[key]) for key in ("input_ids", "attention_mask") if key in inputs}
        yield result
        seen += result["input_ids"].numel()
        if seen >= max_tokens:
            return


def _joined(items: Iterable[Any], load_tokenizer: Callable[[], Any], max_tokens: int) -> Tensor:
    """The token ids of strings or rows, one after the other, `[N]`."""
    parts: list[Tensor] = []
    tokenizer = None
    for item in items:
        ids = item.get("input_ids") if isinstance(item, Mapping) else item if isinstance(item, Tensor) else None
        if ids is None:
            text = item if isinstance(item, str) else _text_of(item)
            tokenizer = tokenizer or load_tokenizer()
            parts.append(tokenize(tokenizer, text))
        else:
            parts.append(torch.as_tensor(ids, dtype=torch.long).flatten())
        if sum(map(len, parts)) >= max_tokens:
            break
    return torch.cat(parts)[:max_tokens]


def _text_of(row: Any) -> str:
    """The text of a dataset's row: its column "text", or the first one of strings."""
    if not isinstance(row, Mapping):
        raise ValueError(
            f"expected strings, rows with a text or input_ids, or batches [B, T], got {type(row).__name__}"
        )
    column = "text" if "text" in row else next((key for key, value in row.items() if isinstance(value, str)), None)
    if column is None:
        raise ValueError(f"a row has no column of text, only {', '.join(row)}")
    text: str = row[column]
    return text
