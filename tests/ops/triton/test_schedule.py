"""The schedule: the order of an attention kernel's programs, and blocks of keys that several programs share."""

from __future__ import annotations

import math

import pytest
import torch
import triton
from kernel_cases import DEVICE, Raw, plain_problem, raw_problem, shrink_tiles
from tiled_cases import Case

from hf_qknorm.ops.triton import attention, schedule, score_math
from hf_qknorm.ops.triton.architectures import Tile
from hf_qknorm.ops.triton.launch import launch
from hf_qknorm.ops.triton.schedule import Division, Gpu, Lines

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


def test_few_blocks_of_keys_are_shared_and_many_are_not() -> None:
    lines = Lines(4096, 128, 4096, 64, since=True)
    gpu = Gpu(132, 50_000_000)
    assert schedule.divide(lines, 71, 1, 1, gpu).parts > 1
    assert schedule.divide(lines, 1, 4, 1, gpu).parts == 1  # nobody to share with
    assert schedule.divide(lines, 4, 9, 1, gpu).parts == 1  # 288 programs
    for group in (1, 2, 3, 7, 16, 71):
        for units in range(1, 9):
            parts, section = schedule.divide(lines, group, units, 1 << 20, gpu)
            assert 1 <= parts <= group
            assert units * parts % section == 0
            assert parts == 1 or units * parts * 32 <= schedule.WAVES * gpu.processors


SHARED = [
    (Case(heads=5, heads_kv=1, queries=40, causal=True, softcap=5.0, sinks=True), BRAIN, 2),
    (Case(heads=6, heads_kv=2, batch=1, queries=40, keys=63, ranges="right_padding"), FULL, 3),
    (Case(heads=6, heads_kv=1, batch=1, queries=40, causal=True, window=7, head_dim=80), HALF, 4),
    (Case(), Raw(heads=(4, 2), length=40, gains=("per_head", "per_head"), biases=("none", "per_head")), 2),
    (Case(causal=True, softcap=5.0), Raw(heads=(4, 1), length=40, dtype=BRAIN, knee=4.0), 3),
    (Case(causal=True), Raw(heads=(4, 2), length=40, head_dim=40, rotary=(20, "interleaved"), dtype=HALF), 2),
]


@pytest.mark.parametrize(("case", "what", "parts"), SHARED, ids=str)
def test_gradients_of_shared_blocks(
    case: Case, what: Raw | torch.dtype, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With three parts, dk and dv have a launch each, as on a Hopper at head_dim 256."""
    shrink_tiles(monkeypatch, key_gradient=Tile(16, 32, 4, 1, apart=parts == 3))
    problem = raw_problem(what, case) if isinstance(what, Raw) else plain_problem(case, what)
    heads = problem.heads.k.shape[0] * problem.heads.k.shape[1]
    monkeypatch.setattr(schedule, "divide", lambda *_: Division(parts, heads))
    problem.check()


@pytest.mark.parametrize("parts", [1, 2])
def test_sections_change_no_bit(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_tiles(monkeypatch)
    raw = Raw(heads=(4, 2), batch=2, length=33, dtype=BRAIN, gains=("per_head", "per_head"), biases=("shared", "none"))
    problem = raw_problem(raw, Case(causal=True, softcap=50.0))
    found = []
    for section in (1, 4):
        monkeypatch.setattr(schedule, "section", lambda *_, section=section: section)
        monkeypatch.setattr(schedule, "divide", lambda *_, section=section: Division(parts, section))
        found.append(problem.results())
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_real_call_shares_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the processors of a Hopper a short text has too few blocks."""
    seen: list[int] = []
    add = attention.key_parts.add_parts
    monkeypatch.setattr(attention.key_parts, "add_parts", lambda dk, *rest: (seen.append(dk.shape[1]), add(dk, *rest)))
    plain_problem(Case(batch=1, heads=4, heads_kv=1, queries=300, causal=True), BRAIN).check()
    assert seen
    assert seen[0] > 1


def test_the_makespan_of_a_few_programs() -> None:
    assert schedule.makespan([4, 3, 2, 1], 2) == 5
    assert schedule.makespan([1, 2, 3, 4], 2) == 6
    assert math.isclose(schedule.makespan([1.5] * 7, 3), 4.5)
