"""A checkpoint and a text, loaded to measure one on the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hf_qknorm.checkpoint import Source, load_causal, load_tokenizer
from hf_qknorm.measure.batches import Batches, check_batches
from hf_qknorm.measure.predictions import require_causal
from hf_qknorm.measure.text import as_batches, sequence_length
from hf_qknorm.model.placement import placement

SEQUENCES = 8  # in a forward pass


@contextmanager
def loaded_with_text(source: Source, data: Any, max_tokens: int, length: int | None) -> Iterator[tuple[Any, Batches]]:
    """Yield a checkpoint's model, and up to `max_tokens` tokens of the texts or path `data`, as `as_batches` cuts them.

    If the checkpoint does not fit into memory, layers are read from the disk in
    each forward pass.

    Raises, before the weights are read, OSError without a tokenizer, and ValueError for an impossible length, a model
    with bidirectional attention, and too little text.
    """
    length = sequence_length(source.config, length)
    require_causal(source.config)
    tokenizer = load_tokenizer(source.folder)
    batches = as_batches(None, data, lambda: tokenizer, batch=SEQUENCES, length=length, max_tokens=max_tokens)
    check_batches(batches, source.config)
    with TemporaryDirectory(prefix="hf-qknorm-") as offload:
        yield load_causal(source, **placement(source.folder, None, Path(offload))), batches
