"""The implementations of attention, each as it runs here. This folder is on the path, too."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils._device import _device_constructors

from qknorm_tests.attention_cases import IMPLEMENTATIONS, Implementation
from qknorm_tests.memory import fill_new_memory

_device_constructors()  # torch caches this list of functions: fill it before they are replaced


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New memory is NaN, that of C++ code too."""
    fill_new_memory(monkeypatch)
    torch.use_deterministic_algorithms(not torch.cuda.is_available())  # cuBLAS would need a setting
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, poison: None) -> Implementation:
    """One that can run; Triton's kernels with small tiles, and in the interpreter where there is no GPU."""
    if request.param == "cpp":
        request.getfixturevalue("compiled")
    if request.param.startswith("triton"):
        pytest.importorskip("triton", reason="needs Triton, which torch's CPU wheels lack: pip install triton")
        from qknorm_tests import interpreter, tiles

        interpreter.install()
        tiles.shrink_tiles(monkeypatch)
        if "pointers" in request.param:
            tiles.use_pointers(monkeypatch)
    return IMPLEMENTATIONS[request.param]
