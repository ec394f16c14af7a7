"""A checkpoint and a text, loaded to measure one on the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hf_qknorm.checkpoint import Source, load_causal, load_tokenizer
from hf_qknorm.measure import text
from hf_qknorm.measure.batches import Batches, check_batches
from hf_qknorm.measure.predictions import require_causal
from hf_qknorm.model.placement import placement

SEQUENCES = 8  # in a forward pass


@contextmanager
def loaded_with_text(
    source: Source, texts: str | None, tokens: int, length: int | None
) -> Iterator[tuple[Any, Batches]]:
    """Yield a checkpoint's model, and up to `tokens` tokens of `texts` in batches of sequences of `length` tokens.

    `texts` is a source for `load_text`. If the checkpoint does not fit into memory, layers are read from the disk in
    each forward pass.

    Raises, before the weights are read, OSError without a tokenizer, and ValueError for an impossible length, a model
    with bidirectional attention, and too little text.
    """
    length = text.sequence_length(source.config, length)
    require_causal(source.config)
    tokenizer = load_tokenizer(source.folder)
    ids = text.tokenize(tokenizer, text.load_text(texts, limit=text.CHARACTERS * tokens))[:tokens]
    check_batches([{"input_ids": ids[None]}], source.config)
    with TemporaryDirectory(prefix="hf-qknorm-") as offload:
        model = load_causal(source, **placement(source.folder, None, Path(offload)))
        yield model, text.cut(ids, SEQUENCES, length)
