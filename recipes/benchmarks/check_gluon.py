"""Compare the Gluon kernel with the plain one and the oracle: errors of the output, and equal bits on each run.

    python recipes/benchmarks/check_gluon.py
    compute-sanitizer --tool racecheck python recipes/benchmarks/check_gluon.py --small

Prints a line a case, exits with 1 if one is over the error budget (see `tests/helpers/error_budget.py`) or differs from
run to run. Gradients, and with them the log-sum-exp, are for `tests/ops/triton/test_gluon.py`. `--cpu` tries the script
out in Triton's interpreter, which knows no Gluon: there the plain kernel is checked alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context

import torch
from bench_cases import Case, Inputs, Results, draw, exactly, judge, oracle, results
from bench_implementations import ours

SWITCH = "HF_QKNORM_GLUON"
Problem = tuple[Case, bool, float | None]  # whether norm and RoPE are fused in, and the cap
SMALL: list[Problem] = [(Case(4, 2, 128, 300), True, 50.0)]
ALL: list[Problem] = [
    *SMALL,
    *((Case(4, 2, d, 1000, batch=2), True, softcap) for d in (64, 128, 256) for softcap in (50.0, None)),
    *((Case(7, 1, d, 333, batch=2), False, softcap) for d in (96, 256) for softcap in (50.0, None)),
    (Case(16, 4, 128, 4096), True, 50.0),
]
TINY: list[Problem] = [(Case(2, 1, 16, 40), True, 50.0)]


def by(kernel: str, problem: Problem, x: Inputs) -> Results:
    """The output of a forward pass by the kernel "plain" or "Gluon"."""
    case, normed, softcap = problem
    os.environ[SWITCH] = str(int(kernel == "Gluon"))
    return results(lambda y: ours(case, y, normed=normed, softcap=softcap), x, ())


def check(problem: Problem, device: str) -> tuple[bool, str]:
    """Whether the problem passes, and its line of the report."""
    case, normed, softcap = problem
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    (x,) = draw(case, 1, torch.device(device), dtype)
    exact, eager = (results(lambda y: oracle(case, y, normed, softcap), inputs, ()) for inputs in (exactly(x), x))
    passed, verdicts = True, []
    for kernel in ("plain",) if device == "cpu" else ("plain", "Gluon"):
        first, again = (by(kernel, problem, x)["out"] for _ in range(2))
        verdict = judge({"out": first}, exact, eager)["out"]
        same = torch.equal(first, again)
        passed &= same and verdict.passed
        verdicts.append(
            f"{kernel} {verdict.error:.1e} of {verdict.budget:.1e}" + ("" if same else ", DIFFERS when rerun")
        )
    kind = ("norm, RoPE, " if normed else "") + ("no cap" if softcap is None else f"cap {softcap:g}")
    return passed, f"{'passed' if passed else 'FAILED'} {case} {kind} | " + " | ".join(verdicts)


def main(arguments: list[str]) -> int:
    """Check all problems; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="one small case, as for compute-sanitizer")
    parser.add_argument("--cpu", action="store_true", help="the plain kernel alone, in Triton's interpreter")
    parser.add_argument("--list", action="store_true", help="print the cases, and end")
    args = parser.parse_args(arguments)
    problems = TINY if args.cpu else SMALL if args.small else ALL
    if args.list:
        print("\n".join(str(case) for case, *_ in problems))
        return 0
    if args.cpu and os.environ.get("TRITON_INTERPRET") != "1":  # Triton reads it when it is imported
        os.execve(sys.executable, [sys.executable, __file__, *arguments], os.environ | {"TRITON_INTERPRET": "1"})
    if not args.cpu and not torch.cuda.is_available():
        print("needs a Hopper GPU; --cpu tries the script out without one", file=sys.stderr)
        return 2
    checked = partial(check, device="cpu" if args.cpu else "cuda")
    failures = 0
    # many compile in parallel; one alone runs in this process, for a sanitizer
    with ProcessPoolExecutor(8, get_context("spawn")) if len(problems) > 1 else nullcontext() as pool:
        for passed, line in pool.map(checked, problems) if pool else map(checked, problems):
            failures += not passed
            print(line, flush=True)
    print(f"{len(problems)} cases, {failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
