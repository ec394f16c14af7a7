"""A tokenizer of bytes, made without a download, and a tiny causal language model for it."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qknorm_tests.tables import sharp_model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte, after those for padding, start and end."""
    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **names)


def save_text_model(folder: Path) -> Path:
    """Save an unpatched Llama and its tokenizer in `folder`, and return it."""
    tokenizer = byte_tokenizer()
    sharp_model("llama", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
