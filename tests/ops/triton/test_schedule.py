"""The schedule: sections of heads that fit the L2 cache, and the order of their programs."""

from __future__ import annotations

import pytest
import torch

from hf_qknorm.ops.triton import schedule
from hf_qknorm.ops.triton.schedule import Gpu
from qknorm_tests.kernel_cases import Raw, raw_problem, shrink_tiles
from qknorm_tests.tiled_cases import Case

BRAIN = torch.bfloat16


def heads(batch: int, count: int, length: int, head_dim: int = 128) -> torch.Tensor:
    return torch.empty(batch, count, length, head_dim, dtype=BRAIN, device="meta")


@pytest.mark.parametrize(
    ("gpu", "of_queries", "of_keys"),
    [
        (Gpu(132, 50_000_000), 32, 8),  # keys and values of 8 heads are 34 MB; for keys, two programs a processor
        (Gpu(132, 10_000_000), 8, 8),  # keys and values of 2 heads are 8 MB
        (Gpu(4, 20_000_000), 16, 1),  # queries and gradients of a group are 17 MB
        (Gpu(4, 1), 4, 1),
        (Gpu(2000, 1), 64, 32),  # too few blocks of keys: all heads
    ],
)
def test_sections_fit_the_cache_and_fill_the_processors(
    gpu: Gpu, of_queries: int, of_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "gpu", lambda device: gpu)
    q, k = heads(4, 32, 8192), heads(4, 8, 8192)
    assert schedule.query_section(q, k, 128) == of_queries
    assert schedule.key_section(q, k, 128) == of_keys


@pytest.mark.costly
def test_sections_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """But those of the gradients of gains and biases, which are sums over heads."""
    shrink_tiles(monkeypatch)
    raw = Raw(heads=(4, 2), batch=2, length=33, dtype=BRAIN, gains=("per_head", "per_head"), biases=("shared", "none"))
    problem = raw_problem(raw, Case(causal=True, softcap=50.0))
    found = []
    for gpu in (Gpu(1, 1), Gpu(1000, 1)):
        monkeypatch.setattr(schedule, "gpu", lambda device, gpu=gpu: gpu)
        found.append(problem.results())
    torch.testing.assert_close(*(x.pop("q_bias") for x in found))
    torch.testing.assert_close(*found, rtol=0, atol=0)
