"""A growing cache that is filled in one dtype and continued in another, with autocast and without."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, PreTrainedModel

from qknorm_tests.covering import covering
from qknorm_tests.error_budget import assert_within_budget
from qknorm_tests.slow import slow_but
from qknorm_tests.tables import make_batch, real, sharp_model

pytest.importorskip("triton", reason="needs Triton, which comes with torch on CUDA and with the test extra")
from hf_qknorm import patch_model
from hf_qknorm.attend.functions import REGISTERED
from hf_qknorm.families.style import CACHE
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.ops.cpu import build
from qknorm_tests.kernel_models import DEVICE

HALF, BRAIN = torch.float16, torch.bfloat16
PIECES = (9, 1, 2)  # past the window of 8
DTYPES = {  # autocast's for each piece; None without it
    "fp32, then bf16": (None, BRAIN, BRAIN),
    "bf16, then fp32": (BRAIN, None, None),
    "fp32, then fp16": (None, HALF, HALF),
    "in turns": (BRAIN, None, BRAIN),
}
CACHES: dict[str, Any] = {
    "dynamic": lambda config: DynamicCache(config=LlamaConfig(num_hidden_layers=1)),
    "sliding": lambda config: DynamicCache(config=config),
}
HERE = DEVICE == "cpu" and build._why_impossible() is None and os.environ.get("HF_QKNORM_CPU") != "0"
BACKENDS = [name for name in REGISTERED if HERE or name != "hf_qknorm_cpu"]
CASES = covering(BACKENDS, DTYPES, ("plain", "left"), CACHES)
INTERPRETED = next(case for case in CASES if case[0] == "hf_qknorm_triton")  # the others take seconds


def model_of(scheme: str | None, backend: str) -> PreTrainedModel:
    """A model with a window; with the scheme None it is not patched."""
    model = sharp_model("mistral", num_hidden_layers=1)
    model = model if scheme is None else patch_model(model, scheme)
    model.set_attn_implementation(backend)
    return model.to(DEVICE)


@torch.no_grad()
def logits_of(model: PreTrainedModel, dtypes: tuple[Any, ...], kind: str, cache: str) -> Tensor:
    """The logits of the tokens that are no padding, in pieces that continue a cache."""
    batch = make_batch(kind, labels=False)
    tokens, mask = (x[:, : sum(PIECES)].to(DEVICE) for x in (batch["input_ids"], real(batch)))
    filled, logits, end = CACHES[cache](model.config), [], 0
    if not patched_layers(model):  # transformers 5.24 stores values in autocast's dtype, and can't join two of these
        config = model.config
        filled.early_initialization(2, config.num_key_value_heads, config.head_dim, model.dtype, model.device)
    for piece, dtype in zip(tokens.split(PIECES, 1), dtypes, strict=True):
        end += piece.shape[1]
        with nullcontext() if dtype is None else torch.autocast(DEVICE, dtype):
            logits.append(model(piece, attention_mask=mask[:, :end].long(), **{CACHE: filled}).logits)
        assert logits[-1].dtype == (dtype or model.dtype)
    return torch.cat([x.to(model.dtype) for x in logits], 1)[mask]


@pytest.mark.parametrize(
    ("backend", "order", "kind", "cache"),
    slow_but([INTERPRETED, *(case for case in CASES if case[0] != INTERPRETED[0])], CASES),
)
def test_logits_are_as_exact_as_without_the_patch(backend: str, order: str, kind: str, cache: str) -> None:
    exact = logits_of(model_of(None, "eager").double(), (None,) * len(PIECES), kind, cache)
    got = logits_of(model_of("none", backend), DTYPES[order], kind, cache)
    for theirs in ("eager", "sdpa"):
        expected = logits_of(model_of(None, theirs), DTYPES[order], kind, cache)
        assert_within_budget(got, exact, expected, theirs)


@pytest.mark.parametrize("backend", ["hf_qknorm", "hf_qknorm_tiled"])
def test_a_model_without_the_patch_has_keys_of_another_dtype_under_autocast(backend: str) -> None:
    """Its RoPE gives fp32; the values are in autocast's dtype."""
    batch = {name: x.to(DEVICE) for name, x in make_batch("left").items()}
    exact = model_of(None, "eager").double()(**batch).logits[real(batch)].detach()
    logits = []
    for name in ("sdpa", backend):
        model = model_of(None, name)
        with torch.autocast(DEVICE, BRAIN):
            result = model(**batch, use_cache=False)
        result.loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        logits.append(result.logits[real(batch)].detach())
    assert_within_budget(logits[1], exact, logits[0])
