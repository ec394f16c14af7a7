"""Kernels run natively on a GPU, and elsewhere in Triton's interpreter; without Triton their tests are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

from qknorm_tests.memory import fill_new_memory

_device_constructors()  # torch caches this list of functions: fill it before they are replaced

try:
    import triton  # noqa: F401
except ImportError:

    class Skipped(pytest.Module):
        """A test module that is skipped without being imported."""

        def collect(self) -> list[pytest.Item]:
            pytest.skip("needs Triton, which torch's CPU wheels lack: pip install triton", allow_module_level=True)

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
        return Skipped.from_parent(parent, path=module_path)
else:
    from qknorm_tests import interpreter

    interpreter.install()


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is NaN."""
    fill_new_memory(monkeypatch)
