"""Batches of a model's inputs: their tokens, what these predict, and sequences that are held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_qknorm.families import FAMILIES
from hf_qknorm.families.class_names import TYPE_PREFIX
from hf_qknorm.model.accelerate_hooks import input_device
from hf_qknorm.model.passes import without_padding

IGNORED: Final = -100  # the target of a position that predicts nothing
MIN_TARGETS: Final = 16  # tokens to predict: fewer do not show how a model predicts

Batch = Mapping[str, Tensor]  # "input_ids" `[B, T]` or "pixel_values" `[B, C, H, W]`, and a model's other inputs
Batches = Sequence[dict[str, Tensor]]


def model_inputs(model: Any, batch: Batch) -> dict[str, Tensor]:
    """The inputs of a forward pass on the model's device: a batch without its labels, which change the loss alone."""
    return {name: x.to(input_device(model)) for name, x in batch.items() if name != "labels"}


def is_real(batch: Batch) -> Tensor:
    """Which tokens are not padding, bool `[B, T]`, by a mask of two or four dimensions."""
    mask, ids = without_padding(batch.get("attention_mask"), None), batch["input_ids"]
    return torch.ones_like(ids).bool() if mask is None else mask.bool().expand_as(ids)


def count_tokens(*batches: Batch) -> int:
    """The number of tokens of all batches without padding; of images, their own number."""
    return sum(int(is_real(x).sum()) if "input_ids" in x else len(x["pixel_values"]) for x in batches)


def longest_sequence(batches: Sequence[Batch]) -> int:
    """The number of tokens of the longest sequence, without padding; 0 for images."""
    return max((int(is_real(batch).sum(1).max()) for batch in batches if "input_ids" in batch), default=0)


def is_bidirectional(config: Any) -> bool:
    """Whether a model with this config is known to have bidirectional attention."""
    base_type = config.model_type.removeprefix(TYPE_PREFIX)
    return base_type in FAMILIES and not FAMILIES[base_type].is_causal(config)


def targets(batch: Batch, config: Any) -> Tensor:
    """The token that each position predicts, `[B, T]`, and −100 where it predicts none, as in training.

    A causal model predicts the next token of the sequence, a bidirectional one the token's own label. Padding neither
    predicts nor is predicted, nor is a token with the label −100, nor the first of a packed document: there
    "position_ids" restart.
    """
    ids, real = batch["input_ids"], is_real(batch)
    labels = batch.get("labels", ids)
    if labels.shape != ids.shape:  # of whole sequences
        labels = ids
    elif is_bidirectional(config) and "labels" in batch:
        return labels.where(real, IGNORED)
    follows, places = real[:, 1:] & real[:, :-1], batch.get("position_ids")
    if places is not None and places.dim() == 2:
        follows = follows & (places.diff() > 0)
    return F.pad(labels[:, 1:].where(follows, IGNORED), (0, 1), value=IGNORED)


def check_batches(batches: Sequence[Batch], config: Any) -> None:
    """Raise ValueError for batches with too few tokens to predict, or with tokens outside of the model's vocabulary.

    Images are not checked.
    """
    if any("pixel_values" in batch for batch in batches):
        return
    found = sum(int((targets(batch, config) != IGNORED).sum()) for batch in batches)
    if found < MIN_TARGETS:
        raise ValueError(
            f"the text gives {found} tokens to predict, expected at least {MIN_TARGETS}: give more text, or a "
            "larger max_tokens (--max-tokens). (Or the model's max_position_embeddings leaves no room for them)"
        )
    size = getattr(config.get_text_config(), "vocab_size", None)
    limits = [batch["input_ids"].aminmax() for batch in batches if batch["input_ids"].numel()]
    for token in (min(int(least) for least, _ in limits), max(int(most) for _, most in limits)):
        if token < 0 or (size is not None and token >= size):
            raise ValueError(
                f"the text holds the token {token}, and the model has {size}, from 0 on: is this its tokenizer?"
            )


def regrouped(batches: Sequence[Batch], most: int) -> list[dict[str, Tensor]]:
    """The sequences of the batches in the same order, up to `most` in a batch.

    Sequences that differ in their inputs or their shapes are not put into one batch.
    """
    found: list[dict[str, Tensor]] = []
    for alone, run in groupby(batches, key=_kind):
        alike = list(run)
        if alone is None:
            found += [dict(batch) for batch in alike]
            continue
        parts = {key: torch.split(torch.cat([batch[key] for batch in alike]), most) for key in alike[0]}
        found += [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
    return found


def divided(
    batches: Sequence[Batch], least: int = 1, most: int | None = None, tokens: int = 0
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """The sequences of batches but an eighth, and this eighth, evenly spread.

    The eighth has at least `least` sequences and `tokens` tokens, but at most half of the sequences, and `most`.
    """
    rows = [row for batch in batches for row in _rows(batch)]
    least = max(least, -(-tokens * len(rows) // max(count_tokens(*rows), 1)))
    count = max(len(rows) // 8, min(least, len(rows) // 2), 1)
    count = min(count, most or count)
    judging = {i * len(rows) // count for i in range(count)}
    size = max(map(_size, batches))
    others, judged = ([row for i, row in enumerate(rows) if (i in judging) is part] for part in (False, True))
    return regrouped(others, size), regrouped(judged, size)


def _size(batch: Batch) -> int:
    """The number of a batch's sequences or images."""
    return len(batch["input_ids"] if "input_ids" in batch else batch["pixel_values"])


def _kind(batch: Batch) -> list[Any] | None:
    """The inputs of a batch and the shapes of a sequence's; None for a batch that can't be divided.

    Such one has an input without a row for each sequence: `cu_seq_lens_q`, or positions `[3, B, T]`.
    """
    rows = _size(batch)
    if any(len(x) != rows or (name == "position_ids" and x.dim() != 2) for name, x in batch.items()):
        return None
    return sorted((name, x.shape[1:]) for name, x in batch.items())


def _rows(batch: Batch) -> list[dict[str, Tensor]]:
    """The sequences of a batch, each as a batch; a batch that can't be divided as it is."""
    if _kind(batch) is None:
        return [dict(batch)]
    return [{name: x[i : i + 1] for name, x in batch.items()} for i in range(_size(batch))]
