"""A checkpoint that conversions and their refusals are tried on."""

from __future__ import annotations

from pathlib import Path

import pytest

from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.tables import sharp_model

LITTER = ("LICENSE", "README.md", "chat_template.jinja", "pytorch_model.bin", ".gitattributes", "training_args.bin")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A sharded Llama with a tokenizer and everything that may lie beside it."""
    folder = save_with_tokenizer(sharp_model("llama", vocab_size=300), tmp_path / "source", max_shard_size="60KB")
    for name in LITTER:
        (folder / name).write_text(name)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    return folder
