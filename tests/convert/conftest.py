"""A checkpoint that conversions and their refusals are tried on."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_qknorm.demo.training import byte_tokenizer
from qknorm_tests.folders import save
from qknorm_tests.tables import sharp_model


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A sharded Llama with a tokenizer and everything that may lie beside it."""
    folder = save(sharp_model("llama", vocab_size=300), tmp_path / "source", max_shard_size="60KB")
    byte_tokenizer().save_pretrained(folder)
    for name in (
        "LICENSE",
        "README.md",
        "chat_template.jinja",
        "pytorch_model.bin",
        ".gitattributes",
        "training_args.bin",
    ):
        (folder / name).write_text(name)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    return folder
