"""The reader of machine code, on code written for the purpose."""

from __future__ import annotations

import pytest
import sass

HEAD = """
Resource usage:
 Common:
  GLOBAL:0
 Function {name}:
  REG:186 STACK:24 SHARED:1024 LOCAL:0 CONSTANT[0]:2040 TEXTURE:0 SURFACE:0 SAMPLER:0
\tFunction : {name}
\t.headerflags\t@"EF_CUDA_SM90"
"""

# An outer loop, 0x20 to 0x70, around one of matrix instructions, 0x30 to 0x60, which waits out of line, at 0x90.
NESTED = [
    "LDC R1, c[0x0][0x28]",
    "@P0 BRA 0x80",
    "IADD3 R2, R2, 0x1, RZ",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR25], R8",
    "@!P1 BRA 0x90",
    "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24, gsb0",
    "@P2 BRA 0x30",
    "@P3 BRA 0x20",
    "EXIT",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR25], R8",
    "@!P1 BRA 0x90",
    "BRA 0x50",
    "BRA 0xc0",
]


def listing(lines: list[str], name: str = "kernel") -> str:
    code = [f"        /*{16 * n:04x}*/                   {text} ;    /* 0x0 */" for n, text in enumerate(lines)]
    return HEAD.format(name=name) + "\n".join(code)


def opcodes(loop: list[sass.Instruction]) -> list[int]:
    return [i.address // 16 for i in loop]


def test_reads_instructions_guards_and_usage():
    text = listing(NESTED)
    code = sass.parse(text, "kernel")
    assert len(code) == len(NESTED)
    assert (code[4].guard, code[4].opcode, code[4].target) == ("!P1", "BRA", 0x90)
    assert [i.matrix for i in code if i.matrix] == ["HGMMA"]
    assert sass.parse_usage(text, "kernel") == sass.Usage(186, 24)


def test_notes_on_scheduling_are_no_operands():
    """As cuobjdump prints them for Blackwell in Triton 3.6."""
    first, second = sass.parse(listing(["@!P0 BRA 0x10   &req={2,1}   ?trans5", "BRA 0x10    ?trans5"]), "kernel")
    assert (first.operands, first.target, first.goes_on) == ("0x10", 16, True)
    assert (second.operands, second.target, second.goes_on) == ("0x10", 16, False)


def test_finds_the_kernel_among_functions():
    text = listing(NESTED[:2], "helper") + listing(NESTED)
    assert len(sass.parse(text, "kernel")) == len(NESTED)


def test_refuses_what_it_cannot_read():
    with pytest.raises(ValueError, match="'other'"):
        sass.parse(listing(NESTED), "other")
    with pytest.raises(ValueError, match="'other'"):
        sass.parse_usage(listing(NESTED), "other")


def test_a_loop_has_its_way_back_from_a_wait_but_not_the_waiting():
    assert [opcodes(loop) for loop in sass.matrix_loops(sass.parse(listing(NESTED), "kernel"))] == [[3, 4, 5, 6, 11]]


def test_loops_one_after_the_other_are_two():
    twice = ["NOP", "HMMA.16816.F32 R4", "@P0 BRA 0x10", "UTCHMMA gdesc[UR4]", "NOP", "BRA.U UP0, 0x30", "EXIT"]
    loops = sass.matrix_loops(sass.parse(listing(twice), "kernel"))
    assert [opcodes(loop) for loop in loops] == [[1, 2], [3, 4, 5]]
    assert [[i.matrix for i in loop if i.matrix] for loop in loops] == [["HMMA"], ["UTCHMMA"]]


def test_a_branch_within_a_loop_belongs_to_it_whole():
    forked = ["NOP", "HGMMA R4", "@P0 BRA 0x40", "FMUL R1", "FADD R1", "@P1 BRA 0x10", "EXIT"]
    (loop,) = sass.matrix_loops(sass.parse(listing(forked), "kernel"))
    assert opcodes(loop) == [1, 2, 3, 4, 5]


def test_straight_code_has_no_loops():
    assert sass.matrix_loops(sass.parse(listing(["HGMMA R4", "EXIT", "BRA 0x20"]), "kernel")) == []
