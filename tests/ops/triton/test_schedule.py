"""The schedule: the order of an attention kernel's programs, and blocks of keys that several programs share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton

from hf_qknorm.ops.triton import schedule, score_math
from hf_qknorm.ops.triton.architectures import Tile
from hf_qknorm.ops.triton.launch import launch
from hf_qknorm.ops.triton.schedule import Division, Gpu, Lines
from qknorm_tests.kernel_cases import DEVICE, Raw, plain_problem, raw_problem, shrink_tiles
from qknorm_tests.tiled_cases import Case

FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


@triton.jit
def _places(out, blocks, section):
    head, block = score_math.place(blocks, section)
    at = out + 2 * triton.language.program_id(0)
    triton.language.store(at, head)
    triton.language.store(at + 1, block)


@pytest.mark.parametrize(("heads", "blocks", "section"), [(6, 4, 1), (6, 4, 2), (6, 1, 3), (5, 7, 5), (1, 3, 1)])
def test_the_simulated_order_is_that_of_the_kernels(heads: int, blocks: int, section: int) -> None:
    out = torch.full((heads * blocks, 2), -1, dtype=torch.int32, device=DEVICE)
    launch(_places, (heads * blocks,), out.device, out, blocks, section)
    order = list(schedule.order(heads, blocks, section))
    assert out.tolist() == [list(place) for place in order]
    assert len(set(order)) == heads * blocks


@pytest.mark.parametrize(
    ("heads", "programs", "size", "expected"),
    [
        (32, 128, 1, 32),  # all fit
        (32, 128, 10, 8),  # ten do: a divisor of the heads
        (32, 128, 60, 4),  # one does, but two programs for each processor come first
        (32, 2, 60, 32),  # fewer programs than that
        (7, 300, 30, 1),
        (7, 100, 30, 7),
    ],
)
def test_sections_fit_the_cache_and_fill_the_processors(heads: int, programs: int, size: int, expected: int) -> None:
    assert schedule.section(heads, programs, size, Gpu(132, 100)) == expected


@pytest.mark.parametrize(
    "case",
    [
        Case(causal=True),
        Case(window=7),
        Case(causal=True, window=20, keys=90),
        Case(causal=True, keys=40),
        Case(window=9, keys=90),
        Case(keys=33),
    ],
    ids=str,
)
def test_the_simulated_tiles_are_those_with_visible_keys(case: Case) -> None:
    queries, keys, window = case.queries, case.keys or case.queries, case.window or 0
    visible = torch.ones(queries, keys, dtype=torch.bool)
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    if case.causal:
        visible &= distance >= 0
    if window:
        visible &= (distance < window) if case.causal else (distance.abs() <= window)

    def tiles(rows: torch.Tensor, block: int, tile: int) -> list[int]:
        """From the first to the last tile with a visible entry."""
        found = []
        for part in rows.split(block):
            seen = part.any(0).nonzero()
            found.append(int(seen.max() // tile - seen.min() // tile + 1) if len(seen) else 0)
        return found

    asked = Lines(queries, 16, keys, 32, until=case.causal, window=window).tiles()
    assert asked == tiles(visible, 16, 32)
    answered = Lines(keys, 32, queries, 16, since=case.causal, window=window).tiles()
    assert answered == tiles(visible.T, 32, 16)


def test_few_blocks_are_shared_and_many_are_not() -> None:
    lines = Lines(4096, 128, 4096, 64, since=True)
    gpu = Gpu(132, 50_000_000)
    assert schedule.divide(lines, 71, 1, 1, gpu).parts > 1
    assert schedule.divide(lines, 1, 2, 1, gpu).parts > 1  # rows of one head
    assert schedule.divide(lines, 4, 9, 3, gpu) == Division(1, 3)  # 288 programs
    assert schedule.divide(Lines(512, 128, 512, 64, since=True), 1, 1, 1, gpu).parts == 1  # sums would take longer
    for group in (1, 2, 7, 71):
        for heads in range(1, 9):
            parts, section = schedule.divide(lines, group, heads, 1, gpu)
            assert heads * parts % section == 0
            assert parts == 1 or heads * parts * 32 <= schedule.WAVES * gpu.processors


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("lines", [Lines(100, 16, 100, 8, until=True), Lines(100, 16, 60, 8, since=True)], ids=str)
def test_parts_have_all_tiles_in_equal_shares(lines: Lines, parts: int) -> None:
    costs = schedule.costs(lines, 3, 2, Division(parts, 2 * parts))
    overhead = schedule.START + (schedule.PARTIAL if parts > 1 else 0)
    tiles = [cost - overhead for cost in costs]
    assert sum(tiles) == 2 * 3 * sum(lines.tiles())
    blocks = sorted((sum(tiles[at : at + parts]) for at in range(0, len(tiles), parts)), reverse=True)
    assert blocks == sorted((3 * n for n in lines.tiles() for _ in range(2)), reverse=True)
    assert all(max(tiles[at : at + parts]) - min(tiles[at : at + parts]) <= 1 for at in range(0, len(tiles), parts))


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


@pytest.mark.costly
def test_a_real_call_shares_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text with few tiles, on a GPU with many processors."""
    shrink_tiles(monkeypatch, processors=64, forward=Tile(32, 16, 4, 1))
    seen: list[int] = []
    divide = schedule.divide

    def noted(*arguments: Any) -> Division:
        seen.append(divide(*arguments).parts)
        return divide(*arguments)

    monkeypatch.setattr(schedule, "divide", noted)
    plain_problem(Case(batch=1, heads=2, heads_kv=1, queries=300, causal=True), BRAIN).check()
    assert len(seen) == 3
    assert min(seen) > 1


def test_the_makespan_of_a_few_programs() -> None:
    assert schedule.makespan([4, 3, 2, 1], 2) == 5
    assert schedule.makespan([1, 2, 3, 4], 2) == 6
    assert math.isclose(schedule.makespan([1.5] * 7, 3), 4.5)
