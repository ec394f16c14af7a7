"""The schedule: the order of an attention kernel's programs, and blocks of keys that several programs share."""

from __future__ import annotations

import pytest
import torch

from hf_qknorm.ops.triton import schedule
from hf_qknorm.ops.triton.architectures import Tile
from hf_qknorm.ops.triton.schedule import Division, Lines
from qknorm_tests.kernel_cases import Raw, plain_problem, raw_problem, shrink_tiles
from qknorm_tests.tiled_cases import Case

FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


# The case, the heads, and the parts of blocks of queries and of keys: some without tiles.
SHARED = [
    (Case(heads=5, heads_kv=1, queries=40, causal=True, softcap=5.0, sinks=True), BRAIN, (2, 2)),
    (Case(heads=6, heads_kv=2, batch=1, queries=40, keys=63, ranges="right_padding"), FULL, (3, 4)),
    (Case(heads=2, heads_kv=1, batch=1, queries=40, causal=True, window=7, head_dim=80), HALF, (4, 5)),
    (Case(), Raw(heads=(4, 2), length=40, gains=("per_head", "per_head"), biases=("none", "per_head")), (2, 3)),
    (Case(causal=True, softcap=5.0), Raw(heads=(2, 1), length=40, dtype=BRAIN, knee=4.0), (3, 4)),
    (Case(causal=True), Raw(heads=(4, 2), length=40, head_dim=40, rotary=(20, "interleaved"), dtype=HALF), (2, 2)),
]


def share(monkeypatch: pytest.MonkeyPatch, queries: int, keys: int, section: int | None = None) -> None:
    """Give each block of queries, and each of keys, so many programs, in sections of all heads or of so many."""

    def divide(lines: Lines, group: int, heads: int, *_: object) -> Division:
        parts = keys if lines.since or group > 1 else queries
        return Division(parts, (section or heads) * parts)

    monkeypatch.setattr(schedule, "divide", divide)


@pytest.mark.parametrize(("case", "what", "parts"), SHARED, ids=str)
def test_results_of_shared_blocks(
    case: Case, what: Raw | torch.dtype, parts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With four parts, dk and dv have a launch each, as on a Hopper at head_dim 256."""
    shrink_tiles(monkeypatch, key_gradient=Tile(16, 32, 4, 1, apart=parts[1] == 4))
    problem = raw_problem(what, case) if isinstance(what, Raw) else plain_problem(case, what)
    share(monkeypatch, *parts)
    problem.check()


@pytest.mark.costly
def test_dropout_and_shared_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights are dropped as of whole blocks."""
    shrink_tiles(monkeypatch)
    problem = plain_problem(Case(causal=True, queries=40, heads_kv=1, dropout=0.5), FULL)
    whole = problem.results()
    share(monkeypatch, 2, 3)
    for name, value in problem.results().items():
        torch.testing.assert_close(value, whole[name])


@pytest.mark.costly
@pytest.mark.parametrize("parts", [2])
def test_sections_change_no_bit(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_tiles(monkeypatch)
    raw = Raw(heads=(4, 2), batch=2, length=33, dtype=BRAIN, gains=("per_head", "per_head"), biases=("shared", "none"))
    problem = raw_problem(raw, Case(causal=True, softcap=50.0))
    found = []
    for section in (1, 4):
        share(monkeypatch, parts, parts, section)
        found.append(problem.results())
    torch.testing.assert_close(*found, rtol=0, atol=0)
