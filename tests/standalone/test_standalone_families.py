"""Every family's stand-alone code computes the same as the package; `pytest --all-families` runs all families."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from hf_qknorm import FAMILIES, Scheme, patch_model
from hf_qknorm.standalone.generate import add_standalone
from qknorm_tests.children import WITHOUT_PACKAGE, child
from qknorm_tests.tables import assert_near, causal_families, make_batch, randomise, real, sharp_model
from qknorm_tests.tiny import tiny_config

NORMED, CAPPED = Scheme(q="rms", k="rms", softcap=5.0), Scheme(softcap=5.0)
FEW = ("deepseek_v3", "gpt_oss")


def swept(config: pytest.Config) -> list[str]:
    """All families, or a few that test_standalone.py leaves out: a latent cache, and sinks."""
    return [t for t in causal_families() if config.getoption("--all-families") or t in FEW]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model_type" in metafunc.fixturenames:
        metafunc.parametrize("model_type", swept(metafunc.config))


def made(model_type: str) -> PreTrainedModel:
    refused = FAMILIES[model_type].refusal(tiny_config(model_type), NORMED)
    return randomise(patch_model(sharp_model(model_type), CAPPED if refused else NORMED)).eval()


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory) -> Path:
    """A checkpoint of each family with a batch, run where the package can't be imported."""
    root = tmp_path_factory.mktemp("families")
    for model_type in swept(request.config):
        made(model_type).save_pretrained(root / model_type)
        add_standalone(root / model_type)
        batch = {name: value.contiguous() for name, value in make_batch("left").items()}
        save_file(batch, root / model_type / "batch.safetensors")
    child(WITHOUT_PACKAGE, *(root / model_type for model_type in swept(request.config)), home=root)
    return root


@pytest.mark.costly
@torch.no_grad()
def test_it_computes_what_the_package_does(model_type, folder):
    alone, batch = load_file(folder / model_type / "alone.safetensors"), make_batch("left")
    expected = made(model_type)(**batch).logits[real(batch)]
    for logits in ("logits", "logits again"):
        assert_near(alone[logits][real(batch)], expected, 1e-5, logits)
