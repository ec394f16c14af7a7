"""Read the machine code of a compiled kernel: instructions, loops, registers and stack.

Needs cuobjdump, which comes with Triton; no GPU.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

# address, predicate, opcode and operands; notes on scheduling (&req={1} ?trans5) may follow
LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)(?:\s+[&?]\S+)*\s*;")
MATRIX = re.compile(r"[A-Z]?GMMA|[HIQ]MMA|UTC[A-Z]*MMA")  # Hopper, all, Blackwell
LEAVE = ("EXIT", "RET", "BRX", "JMX", "KILL")


@dataclass(frozen=True)
class Instruction:
    address: int
    guard: str  # the predicate, "" without one
    opcode: str
    operands: str

    @property
    def matrix(self) -> str:
        """The matrix instruction, "" for another one."""
        found = MATRIX.fullmatch(self.opcode.split(".")[0])
        return found[0] if found else ""

    @property
    def target(self) -> int | None:
        """The address of a branch's target."""
        found = re.search(r"0x([0-9a-f]+)$", self.operands) if self.opcode.startswith("BRA") else None
        return int(found[1], 16) if found else None

    @property
    def goes_on(self) -> bool:
        """Whether the next instruction may be reached from here."""
        if self.guard not in ("", "PT", "UPT"):
            return True
        if self.opcode.startswith("BRA"):
            return "," in self.operands  # BRA.U UP0, 0x40
        return not self.opcode.startswith(LEAVE)


@dataclass(frozen=True)
class Usage:
    """Registers and bytes of stack of a thread; Triton's kernels use the stack for spills only."""

    registers: int
    stack: int


@cache
def read(cubin: bytes, kernel: str) -> tuple[Usage, list[Instruction]]:
    """Disassemble the kernel of that name."""
    from triton import knobs

    with TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return parse_usage(text, kernel), parse(text, kernel)


def parse_usage(text: str, kernel: str) -> Usage:
    """Parse the output of `cuobjdump -res-usage` for the kernel."""
    found = re.search(rf"Function {re.escape(kernel)}:\s*REG:(\d+) STACK:(\d+)", text)
    if not found:
        raise ValueError(f"expected the registers of {kernel!r} from cuobjdump, got {text!r}")
    return Usage(int(found[1]), int(found[2]))


def parse(text: str, kernel: str) -> list[Instruction]:
    """Parse the output of `cuobjdump -sass` for the kernel."""
    sections = re.split(r"^\s*Function : (\S+)$", text, flags=re.MULTILINE)
    code = dict(zip(sections[1::2], sections[2::2], strict=True)).get(kernel, "")
    lines = (LINE.match(line) for line in code.splitlines())
    found = [Instruction(int(m[1], 16), m[2] or "", m[3], m[4]) for m in lines if m]
    if not found:
        raise ValueError(f"expected the code of {kernel!r} from cuobjdump, got that of {sections[1::2]}")
    return found


def matrix_loops(code: list[Instruction]) -> list[list[Instruction]]:
    """The innermost loops with matrix instructions, each without the loops inside of it, which wait for memory."""
    blocks, following = _blocks(code)
    loops = _natural_loops(following)
    busy = {head for head, body in loops.items() if any(i.matrix for b in body for i in blocks[b])}
    innermost = [head for head in busy if not any(other != head and other in loops[head] for other in busy)]
    found = []
    for head in sorted(innermost):
        inside = set().union(*(body for other, body in loops.items() if other != head and other in loops[head]))
        found.append([i for b in sorted(loops[head] - inside) for i in blocks[b]])
    return found


def _blocks(code: list[Instruction]) -> tuple[list[list[Instruction]], list[list[int]]]:
    """Basic blocks, and for each the numbers of its successors."""
    starts = {code[0].address, *(i.target for i in code if i.target is not None)}
    starts |= {b.address for a, b in zip(code, code[1:], strict=False) if a.target is not None or not a.goes_on}
    blocks: list[list[Instruction]] = []
    for i in code:
        if i.address in starts:
            blocks.append([])
        blocks[-1].append(i)
    number = {block[0].address: n for n, block in enumerate(blocks)}
    following = []
    for n, block in enumerate(blocks):
        after = [number[block[-1].target]] if block[-1].target in number else []
        following.append(after + [n + 1] * (block[-1].goes_on and n + 1 < len(blocks)))
    return blocks, following


def _natural_loops(following: list[list[int]]) -> dict[int, set[int]]:
    """The blocks of each natural loop, by its header: the target of a back edge, which dominates its source."""
    before: list[list[int]] = [[] for _ in following]
    for n, after in enumerate(following):
        for m in after:
            before[m].append(n)
    dominators = _dominators(before)
    loops: dict[int, set[int]] = {}
    for n, after in enumerate(following):
        for head in after:
            if head in dominators[n]:
                body = loops.setdefault(head, {head})
                todo = [n]
                while todo:
                    block = todo.pop()
                    if block not in body:
                        body.add(block)
                        todo += before[block]
    return loops


def _dominators(before: list[list[int]]) -> list[set[int]]:
    """The dominators of each block; empty for an unreachable block."""
    everything = set(range(len(before)))
    found = [{0}, *(everything for _ in before[1:])]
    changed = True
    while changed:
        changed = False
        for n in range(1, len(before)):
            ways = [found[m] for m in before[n]]
            new = {n} | set.intersection(*ways) if ways else set()
            if new != found[n]:
                found[n], changed = new, True
    return found
