"""A checkpoint and a text, loaded to measure one on the other."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_qknorm.checkpoint.memory import SEQUENCES, memory_left, place_weights
from hf_qknorm.checkpoint.pretrained import load_causal, load_tokenizer
from hf_qknorm.checkpoint.source import Source
from hf_qknorm.measure import text
from hf_qknorm.measure.distributed import Batches
from hf_qknorm.measure.predictions import require_causal


@contextmanager
def loaded_with_text(
    source: Source, texts: str | None, tokens: int, length: int | None
) -> Iterator[tuple[Any, Batches]]:
    """Yield a checkpoint's model, and up to `tokens` tokens of `texts` in batches of sequences of `length` tokens.

    `texts` is a source for `load_text`. If the checkpoint does not fit into memory, layers are read from the disk in
    each forward pass, and batches are as large as fit.

    Raises, before the weights are read, OSError without a tokenizer, and ValueError for an impossible length, a model
    with bidirectional attention, and too little text.
    """
    length = text.sequence_length(source.config, length)
    require_causal(source.config)
    tokenizer = load_tokenizer(source.folder)
    ids = text.tokenize(tokenizer, text.load_text(texts, limit=text.CHARACTERS * tokens))[:tokens]
    text.check_batches([{"input_ids": ids[None]}], source.config)
    scratch = Path(tempfile.gettempdir(), source.folder.name)
    memory = memory_left(None)
    with place_weights(source, length, memory, scratch) as (placement, sequences):
        model, most = load_causal(source, "auto", **placement), sequences or SEQUENCES
        row = {"input_ids": ids}
        yield model, text.batches_for(model, [row], None, batch=most, length=length, max_tokens=tokens)
