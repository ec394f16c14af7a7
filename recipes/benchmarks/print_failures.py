"""A plugin of pytest that prints each failure when it happens: a stage that is stopped has printed all until then."""

from __future__ import annotations

import pytest

MOST = 2000  # characters


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.nodeid}\n{report.longreprtext[-MOST:]}", flush=True)
