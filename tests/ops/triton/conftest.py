"""Kernels run natively on a GPU, and elsewhere in Triton's interpreter; without Triton their tests are skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors

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
    """Fill new memory with NaN, so that missing writes and stray reads show."""

    def poisoned(create: Any) -> Any:
        def new(*arguments: Any, **options: Any) -> Tensor:
            x = create(*arguments, **options)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return new

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
