"""Data to measure on: texts, files and batches of the user's, as batches of a model's inputs."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import TransformersKwargs

from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.paths import LONGEST, user_path
from hf_qknorm.files.untrusted import check_count, load_tokenizer, read_start
from hf_qknorm.measure.batches import count_tokens

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".csv")
INPUTS = {"input_ids": 2, "pixel_values": 4}  # of the models that calibrate takes, and the dimensions of a batch
EXPECTED = "expected texts (one, or a list), a path, or batches: a list of tensors [B, T], or of mappings of tensors"
CHARACTERS = 16  # read per token that is asked for: more than tokens have
WORDS = 16  # a string of one line with fewer is a path: text must have that many tokens to predict
LENGTH, LEARNED_LENGTH = 256, 1024  # tokens in a sequence by default, and at most where positions are learned

T = TypeVar("T")


def load_text(source: str | Path | None = None, limit: int = 4_000_000) -> str:
    """Up to `limit` characters from a file or a folder of text files.

    None stands for the source files of Python's standard library, which every machine has.

    Raises FileNotFoundError for a path that does not exist, ValueError for a source without text, in no UTF-8, or that
    can't be read twice.
    """
    if source is None:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    elif os.path.isdir(path := user_path(source, "the text's source")):
        paths = sorted(p for p in path.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file())
    elif os.path.isfile(path):
        paths = [path]
    elif os.path.exists(path):
        raise ValueError(f"{source} is a pipe or a device, which can't be read twice: write its text to a file first")
    else:
        raise FileNotFoundError(f"no such file or folder: {str(source)[:200]}")
    text = "\n".join(_up_to(limit, map(partial(read_start, limit=limit), paths)))[:limit]
    if not text.strip():
        raise ValueError(f"{source}: no text in it (in a folder, {', '.join(TEXT_SUFFIXES)} are read)")
    return text


def names_a_path(data: Any) -> bool:
    """Whether data is a path in place of text: a string that exists, or is too short to measure anything on."""
    if not isinstance(data, str) or len(data) > LONGEST:
        return isinstance(data, Path)
    return os.path.exists(os.path.expanduser(data)) or ("\n" not in data and len(data.split()) < WORDS)


def check_text(data: Any) -> None:
    """Raise what `load_text` raises for a path that does not exist or has no text; reads its start alone."""
    if data is None or names_a_path(data):
        load_text(data, limit=1_000_000)


def tokenize(tokenizer: Any, text: Any) -> Tensor:
    """The token ids of a text, `[N]`.

    Raises ValueError for another item than a text, and for a tokenizer that fails or returns no tokens.
    """
    if not isinstance(text, str):
        raise ValueError(f"an item is of type {type(text).__name__} behind a text: {EXPECTED}")
    where = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    try:
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)
    except Exception as error:  # the libraries of tokenizers share no base class
        raise ValueError(f"{where}: the tokenizer fails ({shorten(str(error))}): restore its files") from error
    if text and not len(ids):
        raise ValueError(f"{where}: the tokenizer gives no tokens for {len(text):,} characters: restore its files")
    return ids


def sample_batches(ids: Tensor, count: int, batch: int, length: int, seed: int) -> list[Tensor]:
    """`count` batches `[batch, length]` from random places of ids `[N]`, reproducible by `seed`."""
    if len(ids) < length + 2:
        raise ValueError(f"expected over {length + 1} tokens for sequences of {length}, got {len(ids)}: give more text")
    generator = torch.Generator().manual_seed(seed)
    places = (torch.randint(len(ids) - length - 1, (batch,), generator=generator) for _ in range(count))
    return [torch.stack([ids[i : i + length] for i in starts.tolist()]) for starts in places]


def cut(ids: Tensor, batch: int, length: int) -> list[dict[str, Tensor]]:
    """Token ids `[N]` as batches of `batch` sequences of `length`; fewer than `length` as one sequence."""
    whole = ids[: len(ids) // length * length].view(-1, length)
    return [{"input_ids": rows} for rows in (torch.split(whole, batch) if len(whole) else [ids[None]])]


def context_length(config: Any) -> int | None:
    """The length of the longest sequence that a model with this config is for; None if the config has none."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or None


def sequence_length(config: Any, length: int | None = None) -> int:
    """Return `length`, or by default 256, or the number of positions if that is smaller.

    Where positions are learned, queries and keys depend on them: the default is half of the positions, 256 to 1024.
    Raises ValueError for a length under 2, or beyond learned positions.
    """
    learned = getattr(config, "rope_parameters", None) is None
    if length is None:
        positions = getattr(config, "max_position_embeddings", None) or LENGTH
        return min(positions, max(LENGTH, min(positions // 2, LEARNED_LENGTH)) if learned else LENGTH)
    context = context_length(config) if learned else None
    if length < 2 or (context and length > context):
        limit = f"2 to {context}, the model's learned positions" if context else "2 or more"
        raise ValueError(f"length={length}: expected {limit}")
    return check_count(length, "length")


def batches_for(
    model: PreTrainedModel, data: Any, tokenizer: Any, *, batch: int, length: int | None, max_tokens: int
) -> list[dict[str, Tensor]]:
    """`as_batches` with the model's default length and, for `tokenizer=None`, the tokenizer of its checkpoint."""
    tokenizer, length = model.name_or_path if tokenizer is None else tokenizer, sequence_length(model.config, length)
    return as_batches(model, data, tokenizer, batch=batch, length=length, max_tokens=max_tokens)


def as_batches(
    model: Any, data: Any, tokenizer: Any, *, batch: int, length: int, max_tokens: int
) -> list[dict[str, Tensor]]:
    """The model's inputs from `data`, up to about `max_tokens` tokens without padding, or images.

    `data` is one of:
    - texts: a string or an iterable of strings, joined and cut into sequences of `length`, `batch` at a time
    - a path, for `load_text`; None for its default
    - batches: an iterable of tensors `[B, T]`, or of mappings from names to tensors with a row for each sequence, as a
      DataLoader yields them. Tensors that the model's forward does not take are left out

    `tokenizer` is one, or where to load it from if there is text. Items that are not needed are not read. Raises
    ValueError for empty data and for anything else.
    """
    check_count(batch, "batch_size")
    check_count(max_tokens, "max_tokens")
    if data is None or names_a_path(data):
        data = load_text(data, limit=CHARACTERS * max_tokens)
    if isinstance(data, Mapping | Tensor) or not isinstance(data, Iterable):
        raise ValueError(f"the data is of type {type(data).__name__}: {EXPECTED}")
    items = iter([data] if isinstance(data, str) else data)
    first = next(items, None)
    if first is None:
        raise ValueError(f"the data is empty: {EXPECTED}")
    items = chain([first], items)
    if isinstance(first, str):
        if not isinstance(data, str) and len(first) <= LONGEST and os.path.exists(first):
            raise ValueError(f"the data is a list of paths ({shorten(first)}): give one path, of a file or folder")
        if tokenizer == "":
            raise ValueError("text needs a tokenizer, and this model has no name to load one by: pass tokenizer=")
        tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        parts = _up_to(max_tokens, (tokenize(tokenizer, text) for text in items))
        return cut(torch.cat(list(parts))[:max_tokens], batch, length)
    return list(_up_to(max_tokens, map(partial(_inputs, model), items), size=count_tokens))


def taken_inputs(model: Any, batch: Mapping[str, Any]) -> set[str]:
    """The names in a batch that a model's forward takes; one with **kwargs takes those of its base classes too."""
    own = signature(model.forward).parameters
    if all(x.kind is not x.VAR_KEYWORD for x in own.values()):
        return batch.keys() & own.keys()
    bases = (signature(vars(cls)["forward"]).parameters for cls in type(model).__mro__ if "forward" in vars(cls))
    names = {*TransformersKwargs.__annotations__}.union(own, *bases)
    return batch.keys() & names if names & INPUTS.keys() else {*batch}  # all, around another model


def _inputs(model: Any, item: Any) -> dict[str, Tensor]:
    """The tensors of a batch that the model takes."""
    batch = {"input_ids": item} if isinstance(item, Tensor) else item
    if not isinstance(batch, Mapping):
        raise ValueError(f"got {type(item).__name__}: {EXPECTED}")
    taken = taken_inputs(model, batch)
    if "input_ids" in batch and "pixel_values" in batch.keys() - taken:
        raise ValueError(f"a batch has pixel_values, and {type(model).__name__} takes no images: give text alone")
    taken |= batch.keys() & INPUTS.keys()  # of one that it does not take, `check_inputs` gives the reason
    found = {name: x for name, x in batch.items() if name in taken and isinstance(x, Tensor) and x.dim()}
    if not any(name in found and found[name].dim() == dims for name, dims in INPUTS.items()):
        shown = ", ".join(f"{name} {list(getattr(x, 'shape', '')) or type(x).__name__}" for name, x in batch.items())
        raise ValueError(
            f'got a mapping of {shown}: {EXPECTED}. Of a data set of texts give the column, data["text"]; rows of '
            "tokens make batches in a DataLoader(data, batch_size=8, collate_fn=...)"
        )
    for name, x in batch.items():  # a mask that is left out would change the result
        if name in taken and hasattr(x, "__len__") and not isinstance(x, Tensor):
            raise ValueError(f"a batch has {name} of type {type(x).__name__}, expected a tensor: {EXPECTED}")
    rows, ids = found.get("attention_mask"), found.get("input_ids")
    if any(not found[name].numel() for name in INPUTS if name in found):
        raise ValueError(f"a batch is empty ({', '.join(f'{name} {list(x.shape)}' for name, x in found.items())})")
    if rows is not None and ids is not None and rows.dim() != 4 and rows.shape != ids.shape:
        raise ValueError(f"a batch has input_ids {list(ids.shape)} and attention_mask {list(rows.shape)}: {EXPECTED}")
    return found


def _up_to(limit: int, parts: Iterable[T], size: Callable[[T], int] = len) -> Iterator[T]:  # type: ignore[assignment]
    """The parts up to the one with which their sizes add up to `limit`; later ones are not read."""
    total = 0
    for part in parts:
        yield part
        total += size(part)
        if total >= limit:
            return
