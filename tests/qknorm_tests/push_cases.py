"""Checkpoints to push, and logits of models, for the tests of pushes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_qknorm import patch_model
from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.tables import randomise
from qknorm_tests.tiny import tiny_model

CARD = "---\nlicense: mit\n---\n# Tiny\n\nA model of the tests.\n"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]  # of `checkpoint(..., max_shard_size="200KB")`


def patched(**settings: Any) -> PreTrainedModel:
    return randomise(patch_model(tiny_model("llama", vocab_size=300, **settings), "qk_norm_cap"))


def checkpoint(folder: Path, **options: Any) -> Path:
    """Save a patched checkpoint with tokenizer, card, licence and chat templates; return the folder."""
    save_with_tokenizer(patched(), folder, **options)
    (folder / "README.md").write_text(CARD)
    (folder / "LICENSE").write_text("MIT")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    return folder


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(40).reshape(2, 20)).logits
