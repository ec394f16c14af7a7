"""The demo's small model, its tokenizer, and the loop that trains it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hf_qknorm.files.progress import progress_bar

LENGTH = 256
BATCH = 8
CLIP = 1.0


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte and one for the end of a text: 257 tokens, nothing to download."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0, **{byte: i for i, byte in enumerate(alphabet, start=1)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end, model_max_length=2 * LENGTH
    )


def small_llama(layers: int = 4) -> PreTrainedModel:
    """A Llama of width 256, with 4 query heads and 2 key heads of 64: with 4 layers it has 3 million parameters."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=257,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2 * LENGTH,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread inside the block.

    The small Llama's operators are short: on a busy machine further threads spend most of their time waiting.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def mean_loss(model: Any, batches: list[Tensor]) -> float:
    """The mean next-token loss over batches `[B, T]`, in nats."""
    training = model.training
    model.eval()
    losses = [float(model(input_ids=batch, labels=batch, use_cache=False).loss) for batch in batches]
    model.train(training)
    return sum(losses) / len(losses)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for an optimiser: weight decay on matrices, none on gains and biases."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def train(
    model: Any,
    batches: list[Tensor],
    *,
    rate: float,
    warmup: int = 0,
    decay: bool = False,
    desc: str | None,
    each_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Make one AdamW step per batch. `each_step(n)` runs after n steps, and before the first.

    `desc` is the text beside the progress bar; None for no bar.
    """
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=rate, betas=(0.9, 0.95))
    model.train()
    each_step(0)
    bar = progress_bar(batches, desc=desc, unit="step", hidden=desc is None)
    for step, batch in enumerate(bar):
        factor = min((step + 1) / max(warmup, 1), 1.0)
        if decay:
            factor *= 0.1 + 0.45 * (1 + math.cos(math.pi * step / len(batches)))
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")
        each_step(step + 1)
