"""What the machine code of the attention kernels may take: shared memory, spills, matrix instructions, issue slots."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from compiled import Failure, Report

from hf_qknorm.ops.triton.architectures import ARCHITECTURES
from hf_qknorm.ops.triton.arguments import NormConstants

HOPPER = 90
KERNELS = (
    "forward_kernel",
    "query_gradient_kernel",
    "key_gradient_kernel",
    "split_kernel",
)


@dataclass(frozen=True)
class Limits:
    """By kernel, the largest head_dim without spills and the matrix instruction; slots by head_dim, TANH and ONLINE.

    `dropout` are slots of the forward pass with dropout and a running maximum, `keys` those of dk and dv without a cap,
    by head_dim.
    """

    spill_free: dict[str, int]
    matrix: dict[str, str]
    slots: dict[tuple[int, str, bool], float]
    dropout: dict[int, float]
    keys: dict[int, float]


def slots_of(head_dim: int, capped: float, uncapped: float, online: float) -> dict[tuple[int, str, bool], float]:
    """The slots of the forward pass: with a cap, without one, and with a running maximum."""
    return {(head_dim, "approx", False): capped, (head_dim, "none", False): uncapped, (head_dim, "none", True): online}


WARPS = dict.fromkeys(KERNELS[:4], "HMMA")  # matrix instructions of a warp
GROUPS = dict.fromkeys(KERNELS[:3], "HGMMA")  # of four warps; `split_kernel` has too few queries
NARROW = dict.fromkeys(KERNELS, 128)
SMALL = Limits(  # with the tiles for 99 KB
    NARROW | {"key_gradient_kernel": 256},
    WARPS,
    slots_of(64, 10.0, 8.0, 11.5) | slots_of(128, 15.0, 13.5, 20.5),
    {64: 17.0, 128: 25.5},
    {64: 18.0, 128: 32.0},
)
LIMITS = {
    90: Limits(
        dict.fromkeys((*KERNELS, "gluon_forward_kernel"), 256),
        GROUPS | {"gluon_forward_kernel": "HGMMA"},
        slots_of(128, 8.5, 6.5, 12.0),
        {64: 16.0, 128: 17.5},
        {64: 11.2, 128: 12.4},
    ),
    100: Limits(
        NARROW,
        dict.fromkeys(KERNELS[:3], "UTCHMMA"),
        slots_of(64, 9.0, 7.0, 9.5) | slots_of(128, 9.0, 7.0, 11.0),
        {64: 16.5, 128: 18.0},
        {64: 11.2, 128: 13.5},
    ),
} | dict.fromkeys((80, 86, 89, 120, 121), SMALL)
LIMITS[103] = LIMITS[100]
GLUON = slots_of(128, 6.5, 5.5, 7.8)
SPILL = 64  # bytes outside of the loops of tiles, which a program stores and loads once
USUAL_SPILL = {"forward_kernel": 0, "query_gradient_kernel": 16}  # of these at head_dim 64 and 128
OPTION_SPILL = dict.fromkeys((80, 86, 89), 24)  # of forward there with ranges or statistics
# Of dk and dv at head_dim 64, and for 9.0 in fp16, in loops: with Hopper's tiles, than which none measured is faster
# there, and of the others with dropout.
KEY_SPILLS = dict.fromkeys((80, 86, 89, 120, 121), 40) | {90: 56, 100: 240, 103: 240}
EXTRA = 0.5  # slots of the plain kernel that Triton 3.9 adds to 3.6's, for descriptors of matrix instructions


def complain(result: Report | Failure, arch: int) -> list[str]:
    """The complaints about it, a line each."""
    where = f"{result.kernel} ({result.configuration})"
    if isinstance(result, Failure):
        return [f"{where}: does not compile: {result.error}"]
    return [f"{where}: {limit}" for limit in broken(result, arch)]


def broken(report: Report, arch: int = HOPPER) -> list[str]:
    """The limits that a kernel breaks, a sentence each."""
    found = []
    limits, shared = LIMITS[arch], ARCHITECTURES[divmod(arch, 10)].shared
    if report.shared > shared:
        found.append(f"{report.shared:,} bytes of shared memory, expected at most {shared:,}")
    if report.dtype == "fp32":
        return found
    if report.kernel in limits.spill_free and not spills_allowed(report, arch):
        expected = f"at most {few_spills(report, arch)}, and none in the loops of tiles"
        found.append(f"{report.spilled:,} bytes spilled, {report.reloads} instructions in loops, expected {expected}")
    matrix = limits.matrix.get(report.kernel)
    if matrix is not None and matrix not in report.matrix:
        found.append(f"no {matrix}, got {report.matrix or 'no matrix instructions'}")
    limit = slots_limit(report, arch)
    if limit is not None and (report.slots is None or report.slots > limit):
        got = "no main loop" if report.slots is None else f"{report.slots:.2f}"
        found.append(f"{got} issue slots a score, expected at most {limit}")
    return found


def spills_allowed(report: Report, arch: int = HOPPER) -> bool:
    """Whether its spills are accepted: few, and outside of loops; those of wide heads, and of an Lp norm's powers."""
    constants = report.constants
    few = report.spilled <= few_spills(report, arch) and report.reloads == 0
    wide = constants["PADDED"] > LIMITS[arch].spill_free[report.kernel]
    return few or wide or of_any_order(constants.get("NORM")) or report.spilled <= spill_in_loops(report, arch)


def few_spills(report: Report, arch: int) -> int:
    """The bytes that a kernel may spill outside of its loops of tiles."""
    constants = report.constants
    if constants["PADDED"] not in (64, 128) or of_any_order(constants.get("NORM")):
        return SPILL
    if report.kernel == "forward_kernel" and (constants.get("RANGES") or constants.get("STATISTICS")):
        return OPTION_SPILL.get(arch, 0)
    return USUAL_SPILL.get(report.kernel, SPILL)


def spill_in_loops(report: Report, arch: int) -> int:
    """The bytes that a kernel may spill in its loops of tiles."""
    if report.kernel != "key_gradient_kernel":
        return 0
    few = report.constants["PADDED"] == 64 or (arch == HOPPER and report.dtype == "fp16")
    return KEY_SPILLS[arch] if few else 0


def of_any_order(norm: NormConstants | None) -> bool:
    """Whether a norm computes powers."""
    return norm is not None and norm.any_order


def slots_limit(report: Report, arch: int = HOPPER) -> float | None:
    """The limit of issue slots for a score, or None.

    The forward pass with no option but dropout has one, and dk and dv with no option.
    """
    constants = report.constants
    loop = (constants.get("PADDED"), constants.get("TANH"), constants.get("ONLINE"))
    if report.dtype == "fp32" or any(constants.get(x) for x in ("SCALED", "WINDOW", "RANGES", "STATISTICS")):
        return None
    if constants.get("DROPOUT"):
        met = report.kernel == "forward_kernel" and loop[1:] == ("none", True)
        return LIMITS[arch].dropout.get(constants["PADDED"]) if met else None
    if report.kernel == "gluon_forward_kernel":
        return GLUON.get(loop)
    if report.kernel == "key_gradient_kernel" and constants["TANH"] == "none":
        return LIMITS[arch].keys.get(constants["PADDED"])
    if report.kernel != "forward_kernel":
        return None
    limit = LIMITS[arch].slots.get(loop)
    if limit is None or arch != HOPPER:
        return limit
    newer = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
    return limit + EXTRA if newer else limit


def unmet(results: list[Report | Failure], arch: int = HOPPER, few: bool = False) -> list[str]:
    """The limits that no report was checked against, as after the renaming of a kernel."""
    reports = [result for result in results if isinstance(result, Report) and result.dtype != "fp32"]
    kernels = {report.kernel for report in reports}
    met = {
        (r.kernel, *(r.constants[x] for x in ("PADDED", "TANH", "ONLINE")), bool(r.constants.get("DROPOUT")))
        for r in reports
        if slots_limit(r, arch) is not None
    }
    wanted = LIMITS[arch].spill_free.keys() - ({"gluon_forward_kernel"} if few else set())
    return [f"no limit was checked of {x}" for x in [*sorted(wanted - kernels), *sorted(limited(arch, few) - met)]]


def limited(arch: int = HOPPER, few: bool = False) -> set[tuple[str, int, str, bool, bool]]:
    """The configurations with a limit of slots: kernel, head_dim, TANH, ONLINE and DROPOUT."""
    gluon_loops = GLUON if arch == HOPPER and not few else {}
    return (
        {("forward_kernel", *loop, False) for loop in LIMITS[arch].slots}
        | {("forward_kernel", columns, "none", True, True) for columns in LIMITS[arch].dropout}
        | {("key_gradient_kernel", columns, "none", False, False) for columns in LIMITS[arch].keys}
        | {("gluon_forward_kernel", *loop, False) for loop in gluon_loops}
    )
