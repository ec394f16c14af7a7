"""A checkpoint that conversions are tried on, and a local Hub, with this process as its client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_api
from huggingface_hub.utils import close_session
from transformers.utils import hub as transformers_hub

from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.server import Hub
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


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A new Hub for one test, logged in as `me` with a write token."""
    with Hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
        monkeypatch.setattr(transformers_hub, "_hf_api", None, raising=False)  # created when first used
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", "hf_writes")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        close_session()  # it may have other proxies
        yield hub
        close_session()
