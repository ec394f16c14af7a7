"""Tiles of the Triton kernels for short sequences."""

import pytest

from hf_qknorm.ops.triton import launch, schedule
from hf_qknorm.ops.triton.architectures import ARCHITECTURES, HOPPER, SMALL, Tile

SHRUNK = {"forward": Tile(16, 32, 4, 1), "query_gradient": Tile(32, 16, 4, 1), "key_gradient": Tile(16, 32, 4, 1)}


def shrink_tiles(monkeypatch: pytest.MonkeyPatch, **tiles: Tile) -> None:
    """Give short sequences many tiles, and a GPU of one processor, so that a section has few heads."""
    monkeypatch.setattr(schedule, "gpu", lambda device: schedule.Gpu(1, 1))
    for table in (HOPPER, SMALL):
        for key, row in table.items():
            monkeypatch.setitem(table, key, row._replace(**(SHRUNK | tiles)))


def use_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give kernels heads as GPUs without a copy engine take them."""
    monkeypatch.setattr(launch, "architecture", lambda device: ARCHITECTURES[8, 0])
