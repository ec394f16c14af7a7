"""Text for calibration and training: where it comes from, and how it becomes batches of tokens `[B, T]`."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".csv")


def load_text(source: str | None = None, limit: int = 4_000_000) -> str:
    """Up to `limit` characters of text: a file, a folder of text files, a Hub dataset's name, or Python's own library.

    None takes the sources of the standard library, which every machine has. A name that is no path is loaded with
    the `datasets` package (its "train" split, the column "text" or the first one of strings).

    Raises FileNotFoundError for a path that is not there, ValueError for a source without text.
    """
    if source is None:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    elif Path(source).is_file():
        paths = [Path(source)]
    elif Path(source).is_dir():
        paths = sorted(p for p in Path(source).rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
    elif source.startswith((".", "/", "~")) or source.count("/") > 1 or Path(source).suffix in TEXT_SUFFIXES:
        raise FileNotFoundError(f"no such file or folder: {source}")
    else:
        return _dataset_text(source, limit)
    parts: list[str] = []
    for path in paths:
        if sum(map(len, parts)) >= limit:
            break
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
    text = "\n".join(parts)[:limit]
    if not text.strip():
        raise ValueError(f"{source}: no text in it (looked for files ending in {', '.join(TEXT_SUFFIXES)})")
    return text


def _dataset_text(name: str, limit: int) -> str:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"{name!r} is no file or folder here; to load it as a Hub dataset: pip install datasets"
        ) from error
    rows = datasets.load_dataset(name, split="train", streaming=True)
    parts: list[str] = []
    size = 0
    for row in rows:
        column = "text" if "text" in row else next((key for key, value in row.items() if isinstance(value, str)), None)
        if column is None:
            raise ValueError(f"the dataset {name!r} has no column of text, only {', '.join(row)}")
        parts.append(row[column])
        size += len(row[column])
        if size >= limit:
            break
    return "\n".join(parts)[:limit]


def tokenize(tokenizer: Any, text: str) -> Tensor:
    """The text's token ids, `[N]`."""
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)


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
    data: Iterable[Any], tokenizer: Any, *, batch: int, length: int, max_tokens: int
) -> Iterator[dict[str, Tensor]]:
    """Batches with "input_ids" `[B, T]` from strings, tensors `[B, T]` or mappings, up to `max_tokens` tokens.

    Strings are joined and cut into sequences of `length`, `batch` at a time.
    """
    data = [data] if isinstance(data, str) else list(data)
    if not data:
        raise ValueError("the calibration data is empty: give texts, or batches with input_ids")
    if all(isinstance(item, str) for item in data):
        ids = tokenize(tokenizer, "\n".join(data))[:max_tokens]
        whole = ids[: len(ids) // length * length].view(-1, length)
        data = [whole[i : i + batch] for i in range(0, len(whole), batch)] or [ids[None]]
    seen = 0
    for item in data:
        if seen >= max_tokens:
            return
        if not isinstance(item, Tensor | Mapping):
            raise ValueError(f"a batch must be a tensor [B, T] or a mapping with input_ids, got {type(item).__name__}")
        inputs = {"input_ids": item} if isinstance(item, Tensor) else dict(item)
        seen += inputs["input_ids"].numel()
        yield {key: torch.as_tensor(inputs[key]) for key in ("input_ids", "attention_mask") if key in inputs}
