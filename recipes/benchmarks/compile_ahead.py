"""A pytest plugin: compile the kernels that tests launch, on many processes, and start none of them.

    python -m pytest -p compile_ahead --compile-only --numprocesses 16 tests/ops/triton

Each kernel is compiled by the first process that meets it, into Triton's cache, where later runs find it: a launch is
compiled with the arguments and options of the test, and skipped. Such a test computes nothing, so that its outcome is
not reported. With and without the option, the summary counts kernels: compiled, and found in the cache.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.compiler
from triton.runtime.jit import JITFunction

COUNTS: Counter[str] = Counter()
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compile-only", action="store_true", help="compile the kernels of the tests, and start none")


def pytest_configure(config: pytest.Config) -> None:
    triton.knobs.compilation.listener = count
    if config.getoption("--compile-only"):
        compile_only()


def count(*, cache_hit: bool, **details: Any) -> None:
    COUNTS["found" if cache_hit else "compiled"] += 1


def compile_only() -> None:
    """Replace launches by compilations, each made by one process of this run alone."""
    run, compile_kernel = JITFunction.run, triton.compiler.compile

    def warm_up(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *arguments, grid=grid, warmup=True, **options)

    def compile_once(src: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
        if not claimed(f"{src.hash()} {options}"):
            return None  # no launch needs it
        return compile_kernel(src, target=target, options=options, **more)

    JITFunction.run = warm_up
    triton.compiler.compile = compile_once  # looked up when a kernel is launched for the first time


def claimed(kernel: str) -> bool:
    """Whether this process is the first of the run to ask for the kernel."""
    folder = Path(triton.knobs.cache.dir) / f"claimed-{RUN}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / hashlib.sha256(kernel.encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def pytest_report_teststatus(report: Any, config: pytest.Config) -> tuple[str, str, str] | None:
    return (
        ("run without launches", ".", "RUN") if config.getoption("--compile-only") and report.when == "call" else None
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # a worker's: sent to the main process
        output["kernels"] = dict(COUNTS)
    if session.config.getoption("--compile-only"):
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the counts of a process that ends."""
    COUNTS.update(getattr(node, "workeroutput", {}).get("kernels", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"kernels: {COUNTS['compiled']} compiled, {COUNTS['found']} found in the cache")
