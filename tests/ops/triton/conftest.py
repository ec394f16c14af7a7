"""Kernels run natively on a GPU, and elsewhere in Triton's interpreter; without Triton their tests are skipped."""

from pathlib import Path

import pytest

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
def _poison(poison: None) -> None:
    """New memory is NaN."""
