"""The plans of the attention benchmark: items in parts, in their order, and the checks that they need.

The checks of a part come before its items: the first rows need no other checks than their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench_cases import Case
from bench_checks import Job
from bench_implementations import (
    ARMS,
    COPY,
    CUDNN,
    DECODING,
    FLASH,
    OURS,
    OURS_UNCAPPED,
    PLAIN,
    PROLOGUE,
    VARLEN,
    Implementation,
)
from bench_rivals import FLEX, FUSED_RIVALS, PROLOGUE_RIVALS, SEPARATE
from bench_table import PASSES

TOKENS = 16_384
LENGTHS = (4096, 16_384, 1024)
SHAPES = ((32, 8, 128), (32, 8, 64), (16, 4, 128), (8, 4, 256), (16, 16, 96))
MAIN = (FLASH, OURS, CUDNN)
UNEVEN = (Case(32, 8, 128, 4096), Case(32, 8, 128, 1024), Case(32, 1, 128, 4096))  # few programs: their order matters
STEP = (16, 32_768)  # batch and keys of the most important decode step
TOGETHER = 2  # implementations in a job: more would compile one after the other


@dataclass(frozen=True)
class Item:
    """Implementations that take turns in a case; the first is the baseline of the others."""

    case: Case
    implementations: tuple[Implementation, ...]
    passes: tuple[str, ...] = PASSES
    shown: bool = True  # whether the first has a row: elsewhere it has one already
    seconds: float = 20  # that it is likely to take

    def __str__(self) -> str:
        names = [x.name for x in self.implementations][0 if self.shown else 1 :]
        return f"{self.case} ({'; '.join(names)})"


Part = list[Item]


def causal(shape: tuple[int, int, int], length: int, **options: object) -> Case:
    return Case(*shape, length, batch=TOKENS // length, **options)


def decoding(batch: int, keys: int) -> Item:
    return Item(Case(32, 8, 128, 1, batch, keys=keys), (FLASH, DECODING), ("forward",))


def first_plan() -> Part:
    """The five smallest checks: every loop of the kernels once. Nothing of it is timed."""
    wide, narrow = (replace(causal(shape, 4096), batch=1) for shape in SHAPES[:2])
    cases = {wide: (OURS,), narrow: (OURS_UNCAPPED,), replace(narrow, window=1024): ARMS[-1:]}
    items = [Item(case, implementations) for case, implementations in cases.items()]
    return [*items, Item(replace(wide, prologue=True), (PROLOGUE,)), Item(decoding(*STEP).case, (DECODING,))]


def quick_plan() -> Part:
    """The twenty most important rows."""
    wide, narrow = (causal(shape, 4096) for shape in SHAPES[:2])
    return [
        Item(wide, MAIN),
        Item(narrow, MAIN, PASSES[:2]),
        Item(replace(wide, prologue=True), (COPY, PROLOGUE), PASSES[:2]),
        decoding(*STEP),
    ]


def full_plan() -> list[Part]:
    """All rows: the most important ones and other libraries, then lengths, shapes and options."""
    wide, narrow = SHAPES[:2]
    apart = [causal(shape, TOKENS, window=w) for shape in (wide, narrow) for w in (1024, 4096)]
    first = quick_plan()
    first += [Item(causal(wide, 4096), (FLASH, *PLAIN, OURS_UNCAPPED), PASSES[:1], shown=False)]
    first += [
        Item(causal(shape, 4096), (FLASH, *FUSED_RIVALS, SEPARATE), shown=False, seconds=30) for shape in (wide, narrow)
    ]
    first += [Item(causal(shape, 4096), (*MAIN, PLAIN[0])) for shape in (SHAPES[4], SHAPES[3])]
    longer = [Item(causal(shape, length), MAIN) for length in LENGTHS[1:] for shape in SHAPES[:2]]
    longer += [Item(case, MAIN) for case in UNEVEN]
    shapes = [Item(causal(shape, 4096), (FLASH, *ARMS), shown=False) for shape in (wide, narrow)]
    shapes += [Item(causal(shape, length), MAIN) for length in LENGTHS for shape in SHAPES[2:]]
    shapes += [decoding(batch, keys) for keys in (4096, 32_768) for batch in (1, 16, 64) if (batch, keys) != STEP]
    shapes += [Item(case, (VARLEN, OURS)) for case in apart]
    prologues = [Item(causal(narrow, 4096, prologue=True), (COPY, PROLOGUE), PASSES[:2])]
    prologues += [Item(causal(wide, 4096, prologue=True), (COPY, *PROLOGUE_RIVALS), PASSES[:2], shown=False)]
    flexible = [Item(case, (VARLEN, FLEX), shown=False, seconds=30) for case in apart[:1]]
    flexible += [Item(causal(wide, n), (FLASH, SEPARATE, FLEX), shown=False, seconds=30) for n in LENGTHS[1:]]
    return [first, longer, shapes, prologues, flexible]


def tiny_plan() -> list[Part]:
    """Every kind of item in fp32, small enough for a minute in the interpreter."""
    case = Case(2, 1, 16, 40)
    return [
        [Item(case, MAIN), Item(Case(4, 2, 64, 24), MAIN[:2], ("both",))],
        [
            Item(replace(case, window=24), (VARLEN, OURS, FLEX), PASSES[:2]),
            Item(case, (FLASH, *ARMS, *PLAIN), ("forward",), shown=False),
            Item(case, (FLASH, *FUSED_RIVALS, SEPARATE), shown=False),
            Item(replace(case, prologue=True), (COPY, PROLOGUE, *PROLOGUE_RIVALS), PASSES[:2]),
            Item(Case(2, 1, 16, 1, 2, keys=300), (FLASH, DECODING), ("forward",)),
        ],
    ]


def check_jobs(items: Part, length: int) -> list[Job]:
    """Return the checks for `items`: each configuration once, at a length that the oracle can take."""
    cases: dict[Case, dict[Implementation, list[Case]]] = {}
    for item in items:
        for implementation in item.implementations:
            cases.setdefault(item.case.at(length), {}).setdefault(implementation, []).append(item.case)
    jobs = []
    for case, found in cases.items():
        implementations = sorted(found, key=lambda x: not x.ours)  # ours first: others may crash
        quick = [x for x in implementations if not x.compiled]
        groups = [quick[n : n + TOGETHER] for n in range(0, len(quick), TOGETHER)]
        for together in (*groups, *([x] for x in implementations if x.compiled)):
            jobs.append(Job(case, tuple(together), timed=tuple(tuple(found[x]) for x in together)))
    return jobs


def listing(parts: list[Part], device: str) -> Iterator[str]:
    """A line for each implementation of each item, with the reason if it cannot run."""
    for item in (item for part in parts for item in part):
        yield f"{item.case} | {', '.join(item.passes)}"
        yield from (f"  {x.name}: {x.missing(item.case, device) or 'timed'}" for x in item.implementations)
