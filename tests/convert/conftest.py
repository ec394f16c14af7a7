"""A checkpoint that conversions are tried on, and a Hub in memory."""

import shutil
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.hub import METHODS, Hub
from qknorm_tests.tables import sharp_model

LITTER = ("LICENSE", "README.md", "chat_template.jinja", "pytorch_model.bin", ".gitattributes", "training_args.bin")


@pytest.fixture(scope="session")
def _llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama") / "source"
    folder = save_with_tokenizer(sharp_model("llama", vocab_size=300), place, max_shard_size="60KB")
    for name in LITTER:
        (folder / name).write_text(name)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def llama(tmp_path: Path, _llama: Path) -> Path:
    """A sharded Llama with a tokenizer and everything that may lie beside it."""
    return Path(shutil.copytree(_llama, tmp_path / "source"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A new Hub for one test."""
    hub = Hub(tmp_path / "downloaded")
    for name in METHODS:
        monkeypatch.setattr(HfApi, name, partial(hub.call, name))
    return hub
