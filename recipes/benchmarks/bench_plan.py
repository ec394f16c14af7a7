"""The plan of the attention benchmark: its items in order, and the checks that they need."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench_cases import Case
from bench_checks import Job
from bench_implementations import (
    ARMS,
    COPY,
    CUDNN,
    DECODING,
    FLASH,
    FLEX,
    OURS,
    PROLOGUE,
    PROLOGUE_RIVALS,
    RIVALS,
    SEPARATE,
    VARLEN,
    Implementation,
)
from bench_model import STEPS, Size, Step
from bench_table import PASSES

TOKENS = 16_384
LENGTHS = (4096, 16_384, 1024)
SHAPES = ((32, 8, 128), (32, 8, 64), (16, 4, 128), (8, 4, 256), (16, 16, 96))
MIX = (8192, 4096, 2048, 1024, 512, 256, 128, 128)
MAIN = (FLASH, OURS, CUDNN)
TOGETHER = 4  # implementations in a job: more would compile one after the other


@dataclass(frozen=True)
class Item:
    """Implementations that take turns in a case, or ways to train a model; the first is the baseline of the others."""

    case: Case | None
    implementations: tuple[Implementation, ...] = ()
    passes: tuple[str, ...] = PASSES
    shown: bool = True  # whether the first has a row: elsewhere it has one already
    model: Size | None = None
    steps: tuple[Step, ...] = ()
    seconds: float = 20  # that it is likely to take, compilation included; it may take three times that

    @property
    def title(self) -> str:
        return str(self.case or self.model)

    def __str__(self) -> str:
        names = [x.name for x in (self.implementations or self.steps)][0 if self.shown else 1 :]
        return f"{self.title} ({'; '.join(names)})"


def causal(shape: tuple[int, int, int], length: int, **options: object) -> Case:
    return Case(*shape, length, batch=TOKENS // length, **options)


def decoding(batch: int, keys: int) -> Item:
    return Item(Case(32, 8, 128, 1, batch, keys=keys), (FLASH, DECODING), ("forward",))


def quick_plan() -> list[Item]:
    """The twenty most important rows."""
    wide, narrow = (causal(shape, 4096) for shape in SHAPES[:2])
    return [
        Item(wide, MAIN),
        Item(narrow, MAIN, PASSES[:2]),
        Item(replace(wide, prologue=True), (COPY, PROLOGUE), PASSES[:2]),
        decoding(16, 32_768),
    ]


def full_plan() -> list[Item]:
    """All rows: ours and SDPA first, then their parts, then other libraries, then slow compilations."""
    wide, narrow = SHAPES[:2]
    model = Size()
    items = [Item(causal(shape, 4096), MAIN) for shape in SHAPES]
    items += [Item(causal(shape, 4096, prologue=True), (COPY, PROLOGUE), PASSES[:2]) for shape in (wide, narrow)]
    items += [decoding(batch, keys) for keys in (4096, 32_768) for batch in (1, 16, 64)]
    items += [Item(None, model=model, steps=STEPS[:2], seconds=30)]
    items += [Item(causal(shape, length), MAIN) for length in LENGTHS[1:] for shape in SHAPES]
    apart = [causal(shape, TOKENS, window=w) for shape in (wide, narrow) for w in (1024, 4096)]
    apart += [causal(shape, TOKENS, lengths=MIX) for shape in (wide, narrow)]
    items += [Item(case, (VARLEN, OURS)) for case in apart]
    items += [Item(causal(shape, 4096), (FLASH, *ARMS), shown=False) for shape in (wide, narrow)]
    items += [Item(causal(shape, 4096), (FLASH, *RIVALS), shown=False, seconds=50) for shape in (wide, narrow)]
    prologue = causal(wide, 4096, prologue=True)
    items += [Item(prologue, (COPY, *PROLOGUE_RIVALS), PASSES[:2], shown=False, seconds=20)]
    items += [Item(case, (VARLEN, FLEX), shown=False, seconds=30) for case in (apart[0], apart[4])]
    items += [Item(causal(wide, n), (FLASH, SEPARATE, FLEX), shown=False, seconds=30) for n in LENGTHS[1:]]
    items += [Item(None, model=model, steps=(STEPS[0], *STEPS[2:]), shown=False, seconds=120)]
    return items


def tiny_plan() -> list[Item]:
    """Every part of the full plan in fp32, small enough for a minute in the interpreter."""
    case = Case(2, 1, 16, 40)
    model = Size(hidden=64, inner=96, layers=2, heads=4, heads_kv=2, vocabulary=97, batch=1, length=24)
    return [
        Item(case, MAIN),
        Item(Case(4, 2, 64, 24), MAIN[:2], ("both",)),
        Item(replace(case, window=24), (VARLEN, OURS, FLEX), PASSES[:2]),
        Item(replace(case, lengths=(20, 19, 1)), (VARLEN, OURS, FLEX), PASSES[:2]),
        Item(case, (FLASH, *ARMS), ("forward",), shown=False),
        Item(case, (FLASH, *RIVALS), shown=False),
        Item(replace(case, prologue=True), (COPY, PROLOGUE, *PROLOGUE_RIVALS), PASSES[:2]),
        Item(Case(2, 1, 16, 1, 2, keys=300), (FLASH, DECODING), ("forward",)),
        Item(None, model=model, steps=STEPS),
    ]


def check_jobs(items: list[Item], length: int) -> list[Job]:
    """Return the checks for `items`: each configuration once, at a length that the oracle can take."""
    cases: dict[Case, dict[str, Implementation]] = {}
    models: dict[Size, None] = {}
    for item in items:
        if item.case is not None:
            cases.setdefault(item.case.at(length), {}).update({x.name: x for x in item.implementations})
        if item.model is not None:
            models[item.model.at(length)] = None
    jobs = []
    for case, found in cases.items():
        implementations = sorted(found.values(), key=lambda x: not x.ours)  # ours first: others may crash
        jobs += [Job(case, tuple(implementations[n : n + TOGETHER])) for n in range(0, len(implementations), TOGETHER)]
    return jobs + [Job(None, model=model) for model in models]
