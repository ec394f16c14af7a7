"""Compile launches of Triton kernels for a GPU that is not there, and read what their machine code takes."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from hf_qknorm.ops.triton.arguments import Constants, NormArguments
from hf_qknorm.ops.triton.launch import architecture

OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
MATRIX = re.compile(r"[A-Z]?GMMA|[HIQ]MMA|UTC[A-Z]*MMA")  # Hopper, all, Blackwell


@dataclass(frozen=True)
class Report:
    """The machine code of one launch; `spilled` is bytes of a thread, `matrix` counts of matrix instructions."""

    kernel: str
    constants: dict[str, Any]
    dtype: str
    warps: int
    stages: int
    registers: int
    spilled: int
    shared: int
    matrix: dict[str, int]
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


def flat(constants: dict[str, Any]) -> dict[str, Any]:
    """The constants, with the fields of the last loop's in the place of C and BEYOND."""
    tuples = [constants[name] for name in ("C", "BEYOND") if isinstance(constants.get(name), Constants)]
    fields = {name: getattr(x, "value", x) for loop in tuples for name, x in loop._asdict().items()}
    return {name: value for name, value in constants.items() if name not in ("C", "BEYOND")} | fields


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
        try:
            compiled = run(self, *arguments, grid=grid, warmup=True, **options)
        except Exception as error:  # of any kind: the next kernel is compiled nevertheless
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            reports.append(Failure(self.__name__, constants_text(flat(constants)), reason))
        else:
            reports.append(describe(compiled, flat(constants)))

    JITFunction.run = compile_only
    driver.set_active(Target(arch))
    architecture.cache_clear()
    try:
        yield reports
    finally:
        JITFunction.run = run
        driver._active = active
        architecture.cache_clear()


@cache
def machine_code(cubin: bytes, kernel: str) -> tuple[int, int, list[str]]:
    """The registers and the bytes of stack of a thread, which has spills alone, and the opcodes. No GPU is needed."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(rf"Function {re.escape(kernel)}:\s*REG:(\d+) STACK:(\d+)", text)
    if not found:
        raise ValueError(f"expected the registers of {kernel!r} from cuobjdump, got {text!r}")
    return int(found[1]), int(found[2]), OPCODE.findall(text)


def describe(compiled: Any, constants: dict[str, Any]) -> Report:
    """Read the machine code of a compiled kernel."""
    name = compiled.metadata.name
    registers, spilled, opcodes = machine_code(compiled.asm["cubin"], name)
    dtype = re.search(r"bf16|fp16", str(compiled.src.signature))
    heads = (opcode.split(".")[0] for opcode in opcodes)
    return Report(
        kernel=name,
        constants=constants,
        dtype=dtype[0] if dtype else "fp32",
        warps=compiled.metadata.num_warps,
        stages=constants.get("STAGES", compiled.metadata.num_stages),
        registers=registers,
        spilled=spilled,
        shared=compiled.metadata.shared,
        matrix=dict(Counter(head for head in heads if MATRIX.fullmatch(head))),
        size=len(opcodes),
    )
