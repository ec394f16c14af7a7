"""The model of the sweeps: a small GPT-2 on the characters of a text, in one plain training loop."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ngrams import ngram_loss
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from hf_qknorm import Scheme, patch_model
from hf_qknorm.measure.text import load_text, sample_batches

FOLDS = 10
CHARACTERS = 1_200_000  # as many as tinyshakespeare has, of a text that has more
JUDGED_AT_ONCE = 64  # sequences

Batch = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True)
class Size:
    """A GPT-2's shape and training: `steps` steps of `batch` sequences; at most `judge` sequences are for judging."""

    layers: int
    heads: int
    width: int
    length: int
    batch: int
    steps: int
    warmup: int = 20
    dropout: float = 0.0
    judge: int = 2048
    characters: int = CHARACTERS
    bf16: bool = False  # autocast

    def build(self, vocabulary: int, scheme: str | Scheme) -> PreTrainedModel:
        """Return a patched GPT-2 with random weights, in training mode."""
        config = GPT2Config(
            vocab_size=vocabulary,
            n_positions=self.length,
            n_embd=self.width,
            n_layer=self.layers,
            n_head=self.heads,
            attn_pdrop=self.dropout,
            embd_pdrop=self.dropout,
            resid_pdrop=self.dropout,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        logging.getLogger("hf_qknorm").setLevel(logging.ERROR)
        return patch_model(GPT2LMHeadModel(config), scheme).train()


class Characters:
    """A text as character numbers; tenth `fold` is held out, the rest is for training."""

    def __init__(self, source: str | None, fold: int = FOLDS - 1, limit: int = CHARACTERS) -> None:
        text = load_text(source, limit=limit)
        crc = zlib.crc32(text.encode())
        self.name = (
            f"{Path(source).name if source else 'the standard library'}, {len(text):,} characters, CRC {crc:08x}"
        )
        known = {character: i for i, character in enumerate(sorted(set(text)))}
        ids = torch.tensor([known[character] for character in text])
        start, stop = len(ids) * fold // FOLDS, len(ids) * (fold + 1) // FOLDS
        self.vocabulary = len(known)
        self.seen, self.held_out = torch.cat([ids[:start], ids[stop:]]), ids[start:stop]

    def ngram_losses(self) -> tuple[float, float]:
        """Return the losses of a bigram and of a trigram table on the held-out text."""
        bigram, trigram = (ngram_loss(self.seen, self.held_out, self.vocabulary, order) for order in (2, 3))
        return bigram, trigram

    def training(self, size: Size, seed: int) -> list[Tensor]:
        """Return a batch `[B, T]` for every step."""
        return sample_batches(self.seen, size.steps, size.batch, size.length, seed)

    def judging(self, size: Size) -> list[Tensor]:
        """Return the held-out text from its beginning in sequences that do not overlap, the same for every run."""
        whole = len(self.held_out) // size.length
        sequences = self.held_out[: whole * size.length].view(whole, size.length)[: size.judge]
        return list(sequences.split(JUDGED_AT_ONCE))


def train(
    model: Any,
    batches: Sequence[Batch],
    optimizer: Optimizer,
    *,
    warmup: int = 0,
    floor: float = 1.0,
    clip: float | None = None,
    bf16: bool = False,
    after_step: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Take one step per batch and return the losses. The run ends at a loss that is not finite.

    The rates rise over `warmup` steps and fall along a cosine to `floor` of their value. `after_step(n)` runs after n
    steps, also for n = 0.
    """

    def factor(step: int) -> float:
        cosine = (1 + math.cos(math.pi * step / len(batches))) / 2
        return min((step + 1) / max(warmup, 1), 1.0) * (floor + (1 - floor) * cosine)

    schedule = LambdaLR(optimizer, factor)
    losses = []
    after_step(0)
    for step, batch in enumerate(batches, start=1):
        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            loss = model(**arguments(model, batch)).loss
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        after_step(step)
    return losses


@torch.no_grad()
def held_out_loss(model: Any, batches: Sequence[Batch]) -> float:
    """Return the mean loss over the sequences, or images, of the batches, in nats per token or image."""
    model.eval()
    inputs = [arguments(model, batch) for batch in batches]
    losses = [float(model(**each).loss) * len(each["labels"]) for each in inputs]
    model.train()
    return sum(losses) / sum(len(each["labels"]) for each in inputs)


def arguments(model: Any, batch: Batch) -> Mapping[str, Tensor]:
    """The model's arguments for a batch: token ids `[B, T]`, whose successors are the labels, or the arguments."""
    named = {"input_ids": batch, "labels": batch} if isinstance(batch, Tensor) else batch
    return {name: value.to(model.device) for name, value in named.items()}
