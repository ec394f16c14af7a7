"""Inputs that plain transformers refuses are refused by patched models, in steps of one token too."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_qknorm import patch_model
from hf_qknorm.families.style import CACHE
from hf_qknorm.ops.cpu import build
from qknorm_tests.covering import covering
from qknorm_tests.tables import sharp_model

BACKENDS = ("eager", "sdpa", "hf_qknorm", "hf_qknorm_cpu", "hf_qknorm_tiled", "hf_qknorm_eager")
LENGTHS, CACHES = (1, 3), ("none", "empty", "filled")
BATCH, FILLED = 2, 5
WRONG = {
    "512 rows": lambda length: {"position_ids": torch.zeros(512, length, dtype=torch.long)},
    "two positions more": lambda length: {"position_ids": torch.arange(length + 2)[None]},
    "a mask of more keys": lambda length: {"attention_mask": torch.ones(BATCH, 1, length, 50, dtype=torch.bool)},
}


def model(backend: str | None, model_type: str = "llama") -> PreTrainedModel:
    """The patched model with this backend; without one, the model before it is patched, under SDPA."""
    made = sharp_model(model_type).eval()
    return made if backend is None else patch_model(made, "qk_norm", attn_implementation=backend)


@torch.no_grad()
def run(made: PreTrainedModel, length: int, cache: str, **inputs: Any) -> torch.Tensor:
    """Logits for `length` tokens: without a cache, with an empty one, or as a continuation."""
    ids = torch.arange(3, 3 + BATCH * length).view(BATCH, length)
    past = made(torch.ones(BATCH, FILLED, dtype=torch.long))[CACHE] if cache == "filled" else None
    return made(ids, **{CACHE: past}, use_cache=cache != "none", **inputs).logits


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return model(None)


@pytest.fixture(scope="module")
def patched(request: pytest.FixtureRequest) -> PreTrainedModel:
    if request.param == "hf_qknorm_cpu" and (reason := build.why_not()) is not None:
        pytest.skip(reason)
    return model(request.param)


@pytest.mark.parametrize(
    ("patched", "wrong", "length", "cache"), covering(BACKENDS, WRONG, LENGTHS, CACHES), indirect=["patched"]
)
def test_wrong_shapes_are_refused_where_transformers_refuses_them(wrong, length, cache, patched, plain):
    inputs = WRONG[wrong](length)
    for made in (plain, patched):
        with pytest.raises((RuntimeError, ValueError)):
            run(made, length, cache, **inputs)
