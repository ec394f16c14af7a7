"""A small Llama, a tokenizer that needs no download, and runs that train it: for the demo, recipes and tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hf_qknorm.files.formatting import format_fixed
from hf_qknorm.measure.logit_statistics import logit_statistics
from hf_qknorm.model.attention import evaluating
from hf_qknorm.reports.logit_log import nan_as_inf

LENGTH = 256  # tokens in a sequence


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte and one for the end of a text: 257 tokens, nothing to download."""
    end = "<|endoftext|>"
    vocabulary = {end: 0} | {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": end, "eos_token": end, "pad_token": end}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=2 * LENGTH, **special)


def small_llama(layers: int = 4) -> PreTrainedModel:
    """A Llama of width 256, with 4 query heads and 2 key heads of 64: with 4 layers it has 3 million parameters."""
    config = LlamaConfig(
        vocab_size=257, hidden_size=256, intermediate_size=688, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2 * LENGTH, tie_word_embeddings=True, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(
    model: Any, batches: list[Tensor], rate: float, *, warmup: int, each_step: Callable[[int], None] = lambda step: None
) -> None:
    """Make one AdamW step per batch, at a rate that rises over `warmup` steps and falls along a cosine to a tenth.

    Matrices have a weight decay of 0.1, gains and biases none. `each_step(n)` runs after n steps, and before the first.
    """
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == matrices], "weight_decay": 0.1 * matrices}
        for matrices in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    model.train()
    each_step(0)
    for step, batch in enumerate(batches):
        falling = 0.1 + 0.45 * (1 + math.cos(math.pi * step / len(batches)))
        for group in optimizer.param_groups:
            group["lr"] = rate * falling * min((step + 1) / max(warmup, 1), 1.0)
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        each_step(step + 1)


@torch.no_grad()
def mean_loss(model: Any, batches: list[Tensor]) -> float:
    """The mean next-token loss over batches `[B, T]`, in nats."""
    with evaluating(model):
        losses = [float(model(input_ids=batch, labels=batch, use_cache=False).loss) for batch in batches]
    return sum(losses) / len(losses)


@dataclass(frozen=True)
class Measured:
    """A model's loss on held-out text, in nats per token, and its largest |logit| there, before any cap."""

    loss: float
    max_logit: float


@dataclass
class Run:
    """Continued training of one model at one learning rate: step → `Measured`, the first before training."""

    model: str
    rate: float
    measured: dict[int, Measured] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """The last step that was measured."""
        return max(self.measured)

    def row(self) -> str:
        """A line of the table of runs: the first and last loss, and the largest |logit| of all measurements.

        NaN counts as larger than any number.
        """
        losses = [f"{self.measured[step].loss:.3f}" for step in (0, self.steps)]
        largest = max((each.max_logit for each in self.measured.values()), key=nan_as_inf)
        return aligned(f"rate {self.rate:<8g} {self.model}", *losses, format_fixed(largest, 1))


def aligned(name: str, *cells: str) -> str:
    """A line of a table."""
    return f"   {name:26}" + "".join(f"{cell:>17}" for cell in cells)


def measure(model: Any, batches: list[Tensor]) -> Measured:
    """The model's loss, and its largest |logit|."""
    with logit_statistics(model) as statistics:
        loss = mean_loss(model, batches)
    return Measured(loss, max((float(layer.max_logit.max()) for layer in statistics.values()), key=nan_as_inf))
