"""Compiles the kernels that a function launches, without a GPU, and reports the machine code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sass
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from hf_qknorm.ops.triton.arguments import Constants, NormArguments
from hf_qknorm.ops.triton.launch import architecture

COMPUTING = {"gluon_forward_kernel": 8}  # computing warps; the others load


@dataclass(frozen=True)
class Report:
    """The machine code of one launch; `mufu` and `slots` are instructions of the main loop for one score.

    `spilled` is bytes of a thread, and `reloads` the instructions in all loops of tiles that store or load spills.
    """

    kernel: str
    constants: dict[str, Any]
    dtype: str
    warps: int
    stages: int
    registers: int
    spilled: int
    reloads: int
    shared: int
    matrix: dict[str, int]
    mufu: dict[str, float]
    slots: float | None
    size: int

    @property
    def configuration(self) -> str:
        """The dtype and the constants."""
        return f"{self.dtype} {constants_text(self.constants)}"


@dataclass(frozen=True)
class Failure:
    """A kernel that does not compile."""

    kernel: str
    configuration: str
    error: str


def constants_text(constants: dict[str, Any]) -> str:
    """The constants that differ from "off", as text."""
    shown = {n.lower(): c for n, c in constants.items() if c not in (False, None, "none", "always")}
    return " ".join(n if c is True else f"{n}={c}" for n, c in shown.items())


def constants_of_loops(constants: dict[str, Any]) -> list[dict[str, Any]]:
    """The constants of each inner loop, with the fields of C or of BEYOND; of one loop, or of none, all of them."""
    tuples = [constants[name] for name in ("C", "BEYOND") if isinstance(constants.get(name), Constants)]
    shared = {name: value for name, value in constants.items() if name not in ("C", "BEYOND")}
    fields = [{name: getattr(x, "value", x) for name, x in loop._asdict().items()} for loop in tuples]
    return [shared | own for own in fields or [{}]]


class Target:
    """The part of a driver that Triton needs to compile."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # Triton caches kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(arch: int) -> Iterator[list[Report | Failure]]:
    """Compile the launches inside for `arch`, with Triton's specialisation, into the list, without starting them."""
    reports: list[Report | Failure] = []
    run, active = JITFunction.run, driver._active

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names = {p.name for p in self.params}
        bound = self.signature.bind(*arguments, **{n: value for n, value in options.items() if n in names})
        bound.apply_defaults()
        constants = {p.name: bound.arguments[p.name] for p in self.params if p.is_constexpr}
        norms = [value for value in bound.arguments.values() if isinstance(value, NormArguments)]
        constants["KNEE"] = any(norm.knee is not None for norm in norms)
        loops = constants_of_loops(constants)
        try:
            compiled = run(self, *arguments, grid=grid, warmup=True, **options)
        except Exception as error:  # of any kind: the next kernel is compiled nevertheless
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            reports.append(Failure(self.__name__, constants_text(loops[0]), reason))
        else:
            reports.extend(describe(compiled, loops))

    JITFunction.run = compile_only
    driver.set_active(Target(arch))
    architecture.cache_clear()
    try:
        yield reports
    finally:
        JITFunction.run = run
        driver._active = active
        architecture.cache_clear()


def describe(compiled: Any, loops: list[dict[str, Any]]) -> list[Report]:
    """Read the machine code: a report for each of the kernel's inner loops, of which `loops` has the constants.

    Each has a part of the loops of the machine code, with and without a mask; of a part the cheapest is the main one.
    """
    usage, code = sass.read(compiled.asm["cubin"], compiled.metadata.name)
    dtype = re.search(r"bf16|fp16", str(compiled.src.signature))
    found = sass.matrix_loops(code)
    return [
        Report(
            kernel=compiled.metadata.name,
            constants=constants,
            dtype=dtype[0] if dtype else "fp32",
            warps=compiled.metadata.num_warps,
            stages=constants.get("STAGES", compiled.metadata.num_stages),
            registers=usage.registers,
            spilled=usage.stack,
            reloads=reloads(found),
            shared=compiled.metadata.shared,
            matrix=dict(Counter(i.matrix for i in code if i.matrix)),
            **main_loop(part, constants, compiled.metadata),
            size=len(code),
        )
        for part, constants in zip(equal_parts(found, len(loops)), loops, strict=True)
    ]


def reloads(loops: list[list[sass.Instruction]]) -> int:
    """The number of instructions that store or load spills."""
    return sum(i.opcode.startswith(("LDL", "STL")) for loop in loops for i in loop)


def equal_parts(found: list[list[sass.Instruction]], count: int) -> list[list[list[sass.Instruction]]]:
    """The loops in `count` equal parts, which are empty where there are none: whose loop is which is then unknown."""
    size, rest = divmod(len(found), count)
    return [[] if rest else found[n * size : (n + 1) * size] for n in range(count)]


def main_loop(loops: list[list[sass.Instruction]], constants: dict[str, Any], metadata: Any) -> dict[str, Any]:
    """`mufu` and `slots` of the cheapest of these loops."""
    scores = constants.get("BLOCK_M", 0) * constants.get("BLOCK_N", 0)
    if not (loops and scores):
        return {"mufu": {}, "slots": None}
    main = min(loops, key=len)
    share = COMPUTING.get(metadata.name, metadata.num_warps) * 32 / scores
    units = Counter(i.opcode.split(".")[1].lower() for i in main if i.opcode.startswith("MUFU"))
    return {"mufu": {unit: round(n * share, 2) for unit, n in sorted(units.items())}, "slots": len(main) * share}
