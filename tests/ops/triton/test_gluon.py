"""The Gluon kernel: the calls that it serves, and its results, on Hopper or in the emulator."""

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_qknorm.ops.error_budget import verdict
from hf_qknorm.ops.triton import attention, gluon
from hf_qknorm.ops.triton.launch import launch
from hf_qknorm.ops.types import Options, Visible
from qknorm_tests import gluon_emulator, gluon_machine
from qknorm_tests.attention_cases import DEVICE, TRITON, Case, Problem, Raw, problem, raw_problem
from qknorm_tests.norm_cases import spread
from qknorm_tests.tiles import shrink_tiles

HALF, BRAIN, NONE = torch.float16, torch.bfloat16, Visible()
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
OTHERS: list[dict[str, Any]] = [
    *({"head_dim": width} for width in (64, 96, 256)),
    *({"dtype": torch.float32}, {"batch": 2}, {"statistics": True}, {"window": 7}, {"dropout": 0.1}),
    *({"visible": Visible(ranges=torch.empty(1))}, {"visible": Visible(sinks=torch.empty(1))}),
]


def serves(
    batch: int = 3, head_dim: int = 128, dtype: torch.dtype = BRAIN, visible: Visible = NONE, statistics: bool = False,
    **options: Any,
) -> bool:  # fmt: skip
    q = torch.empty(batch, 32, 400, head_dim, dtype=dtype)
    return gluon.serves(q, visible, Options(1.0, **options), statistics)


def test_the_calls_that_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels are compiled for Hopper, and the switch is on."""
    monkeypatch.setattr(gluon, "INTERPRETED", False)
    monkeypatch.setattr(gluon, "capability", lambda device: gluon.HOPPER)
    assert serves()
    assert serves(dtype=HALF, causal=True, softcap=50.0)
    for changes in OTHERS:
        assert not serves(**changes), changes
    for owner, name, value in ((gluon, "INTERPRETED", True), (gluon, "capability", lambda device: (10, 0))):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert not serves()
    for value, on in (("0", False), ("", True)):  # empty is unset
        monkeypatch.setenv(gluon.SWITCH, value)
        assert serves() == on
    monkeypatch.setenv(gluon.SWITCH, "yes")
    with pytest.raises(ValueError, match="HF_QKNORM_GLUON must be 1 .*, got 'yes'"):
        serves()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It serves few queries too: on Hopper, or in the emulator. Tiles of backward are small."""
    if torch.cuda.is_available() and not ON_HOPPER:
        pytest.skip("needs a Hopper GPU, or the emulator, which reads tensors on the CPU")
    monkeypatch.setattr(gluon, "FEWEST", 0)
    shrink_tiles(monkeypatch)
    started: list[Any] = []

    def counted(*arguments: Any, **options: Any) -> None:
        started.append(arguments)
        (launch if ON_HOPPER else gluon_emulator.launch)(*arguments, **options)

    monkeypatch.setattr(gluon, "launch", counted)
    if not ON_HOPPER:
        monkeypatch.setattr(gluon, "INTERPRETED", False)
        emulate(monkeypatch)
    yield
    assert started


def emulate(monkeypatch: pytest.MonkeyPatch, edit: Callable[[str], str] = str) -> None:
    """Run the Gluon kernel, edited, in the emulator."""
    kernel = gluon_emulator.kernel(edit)
    monkeypatch.setattr(gluon, "_module", lambda: SimpleNamespace(gluon_forward_kernel=kernel))


def passes(given: Problem) -> bool:
    """Whether the output is within the budget; on Hopper it and the gradients must be."""
    if ON_HOPPER:
        given.check(TRITON)
    out = attention.forward(given.heads, given.visible, given.options).out
    exact, plain = (given.attended(spread(given.leaves, x)).out.detach() for x in (torch.float64, given.heads.q.dtype))
    return verdict(out, exact, plain).passed


FEW = {"batch": 1, "heads": 2, "heads_kv": 1, "head_dim": 128}
CASES = [
    (Case(**FEW, queries=40), BRAIN),
    (Case(**FEW, queries=65, softcap=50.0), BRAIN),
    (Case(**FEW, queries=128, causal=True), HALF),
    (Case(**FEW, queries=300, causal=True, softcap=100.0), BRAIN),
    (Case(**FEW, queries=111, keys=300, causal=True, softcap=5.0), HALF),
    (Case(**FEW, queries=300, keys=111, causal=True), BRAIN),
    (Case(**FEW | {"batch": 2, "heads": 3}, queries=140, keys=130), BRAIN),
]
LARGE = [
    (Case(batch=3, heads=7, heads_kv=1, queries=1000, causal=True, head_dim=128), BRAIN),
    (Case(batch=1, heads=8, queries=200, keys=333, head_dim=128, softcap=50.0), HALF),
]


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(("case", "dtype"), [*CASES, *(LARGE if ON_HOPPER else [])], ids=str)
def test_results(case: Case, dtype: torch.dtype) -> None:
    assert passes(problem(case, dtype, DEVICE))


@pytest.mark.costly
@pytest.mark.usefixtures("served")
def test_gradients_from_its_output_and_normaliser() -> None:
    """By the plain kernels."""
    problem(Case(**FEW | {"heads": 1}, queries=70, keys=130, causal=True, softcap=5.0), BRAIN, DEVICE).check(TRITON)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("gain", [0.1, 30.0], ids=["within", "beyond"])
@pytest.mark.parametrize("softcap", [None, 50.0])
def test_normed_heads_of_any_size(softcap: float | None, gain: float) -> None:
    """Within the limits of the first loop, or beyond."""
    given = raw_problem(Raw(heads=(2, 1), dtype=BRAIN, length=140, head_dim=128), Case(causal=True, softcap=softcap))
    assert given.heads.q_norm.gain is not None
    given.heads.q_norm.gain.mul_(gain)
    assert passes(given)


def several_tiles() -> Problem:
    """A maximum that rises over several tiles, for two blocks of queries."""
    given = problem(Case(**FEW | {"heads": 1}, queries=130, keys=500, causal=True), BRAIN, DEVICE)
    given.heads.q.mul_(3.0)
    return given


@pytest.mark.usefixtures("served")
def test_the_time_of_copies_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for late in (False, True):
        monkeypatch.setattr(gluon_machine.Barrier, "late", late)
        assert passes(several_tiles())


def replaced(old: str, new: str, count: int = -1) -> Callable[[str], str]:
    def edit(source: str) -> str:
        assert old in source
        return source.replace(old, new, count)

    return edit


def swapped(first: str, second: str) -> Callable[[str], str]:
    """Two neighbouring lines in the other order."""

    def edit(source: str) -> str:
        found, lines = re.subn(f"( +{re.escape(first)}\n)( +{re.escape(second)}\n)", r"\2\1", source)
        assert lines == 1
        return found

    return edit


MUTANTS = {
    "keys are freed before their scores are done": swapped(
        "x = warpgroup_mma_wait(0, deps=(x,))", "mbarrier.arrive(k_read.index(0), count=1)"
    ),
    "no wait for values": replaced("mbarrier.wait(v_full.index(v_slot), v_phase)", ""),
    "one wait too few for scores": replaced("warpgroup_mma_wait(1, deps=(x,))", "warpgroup_mma_wait(2, deps=(x,))"),
    "the phase of free keys": replaced("k_read.index(slot), phase ^ 1", "k_read.index(slot), phase"),
    "keys are free when one warpgroup has read them": replaced("k_read.index(i), count=2", "k_read.index(i), count=1"),
    "nobody has the first turn": replaced("mbarrier.arrive(turns[1], count=1)", "pass"),
    "fewer bytes than are loaded": replaced("2 * Q.block_type.nbytes", "Q.block_type.nbytes"),
    "no fence between output and its copy": replaced("fence_async_shared()\n    store_tile", "store_tile"),
    "sums are not rescaled": replaced("acc = acc * gl.convert_layout(shrink", "0.0 * gl.convert_layout(shrink"),
    "the first tile has no mask": replaced("score, MASKED=True, C=C\n    )", "score, MASKED=False, C=C\n    )", 1),
}


@pytest.mark.skipif(ON_HOPPER, reason="for the emulator")
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_broken_kernels_are_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By wrong numbers, or an error, of which a deadlock is one; with copies at once, or late."""
    emulate(monkeypatch, MUTANTS[mutant])
    for late in (False, True):
        monkeypatch.setattr(gluon_machine.Barrier, "late", late)
        try:
            if not passes(several_tiles()):
                return
        except gluon_machine.BrokenKernelError:
            return
    pytest.fail("it passes")
