"""What the machine code of the attention kernels may take: shared memory and spills; and its matrix instructions."""

from __future__ import annotations

from compiled import Failure, Report

from hf_qknorm.ops.triton.architectures import ARCHITECTURES

HOPPER = 90
# Matrix instructions of a warp, and those of Hopper and Blackwell, which `split_kernel` may have too few queries for.
WARP, GROUP = "HMMA", {90: "HGMMA", 100: "UTCHMMA", 103: "UTCHMMA"}
KERNELS = ("forward_kernel", "query_gradient_kernel", "key_gradient_kernel", "split_kernel")
# Bytes of a thread that heads of 64 and 128 columns may spill, outside of loops over tiles; others may spill 64.
SPILLS = {"forward_kernel": 0, "query_gradient_kernel": 16}
OTHERS = 64
OPTIONS = dict.fromkeys((80, 86, 89), 24)  # of forward there with ranges or statistics
# Of dk and dv at 64 columns, and on Hopper in fp16, in loops: with these tiles, than which none measured is faster.
KEYS = dict.fromkeys((80, 86, 89, 120, 121), 40) | {90: 56, 100: 240, 103: 240}
WIDEST = {90: 256}  # columns of the widest heads that must keep these limits; 128 elsewhere


def complain(result: Report | Failure, arch: int) -> list[str]:
    """The complaints about it, a line each."""
    where = f"{result.kernel} ({result.configuration})"
    if isinstance(result, Failure):
        return [f"{where}: does not compile: {result.error}"]
    return [f"{where}: {limit}" for limit in broken(result, arch)]


def broken(report: Report, arch: int = HOPPER) -> list[str]:
    """The limits that a kernel breaks, a sentence each."""
    found, shared = [], ARCHITECTURES[divmod(arch, 10)].shared
    if report.shared > shared:
        found.append(f"{report.shared:,} bytes of shared memory, expected at most {shared:,}")
    if report.dtype == "fp32" or report.kernel not in (*KERNELS, "gluon_forward_kernel"):
        return found
    most = most_spilled(report, arch)
    if most is not None and report.spilled > most:
        found.append(f"{report.spilled:,} bytes spilled, expected at most {most}")
    matrix = GROUP.get(arch, WARP)
    warps = {WARP} if report.kernel == "split_kernel" else set()
    if not {matrix, *warps} & report.matrix.keys():
        found.append(f"no {matrix}, got {report.matrix or 'no matrix instructions'}")
    return found


def most_spilled(report: Report, arch: int) -> int | None:
    """The bytes that a kernel may spill; None without a limit, for wide heads and for an Lp norm's powers."""
    constants, norm = report.constants, report.constants.get("NORM")
    columns = constants["PADDED"]
    widest = 256 if report.kernel == "key_gradient_kernel" and arch not in GROUP else WIDEST.get(arch, 128)
    if columns > widest or (norm is not None and norm.any_order):
        return None
    if report.kernel == "key_gradient_kernel" and (columns == 64 or (arch == HOPPER and report.dtype == "fp16")):
        return max(KEYS[arch], OTHERS)
    if columns not in (64, 128):
        return OTHERS
    if report.kernel == "forward_kernel" and (constants.get("RANGES") or constants.get("STATISTICS")):
        return OPTIONS.get(arch, 0)
    return SPILLS.get(report.kernel, OTHERS)
