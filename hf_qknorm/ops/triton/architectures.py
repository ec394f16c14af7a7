"""The GPUs that the kernels run on: how they load tiles, how much shared memory they have, and the sizes of tiles."""

from __future__ import annotations

from typing import Any, NamedTuple


class Tile(NamedTuple):
    """Queries and keys of a tile, and the numbers of warps and pipeline stages of its kernel."""

    queries: int
    keys: int
    warps: int
    stages: int

    @property
    def launch_options(self) -> dict[str, Any]:
        return {"num_warps": self.warps, "num_stages": self.stages}


class Tiles(NamedTuple):
    """The tiles of each kernel; of `decode`, `queries` is the least number of rows."""

    forward: Tile
    query_gradient: Tile
    key_gradient: Tile
    decode: Tile


class Architecture(NamedTuple):
    """A class of GPUs; `tiles` by the size of a number in bytes, and head_dim rounded up to a power of two."""

    shared: int  # bytes of shared memory that a program may take
    descriptors: bool  # whether a copy engine (TMA) reads tensor descriptors
    tiles: dict[tuple[int, int], Tiles]


# Chosen so that no registers spill for sm_90 and the shared memory holds at least one program; of `decode` in half
# precision two, with 64 KiB on their way: more than memory's latency needs.
HOPPER = Architecture(
    232_448,
    True,
    {
        (2, 16): Tiles(Tile(128, 128, 8, 3), Tile(128, 128, 8, 2), Tile(64, 128, 8, 2), Tile(16, 64, 4, 3)),
        (2, 32): Tiles(Tile(128, 128, 8, 3), Tile(128, 128, 8, 2), Tile(64, 128, 8, 2), Tile(16, 128, 4, 3)),
        (2, 64): Tiles(Tile(128, 128, 8, 3), Tile(128, 128, 8, 2), Tile(64, 128, 8, 2), Tile(16, 128, 4, 3)),
        (2, 128): Tiles(Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(16, 64, 4, 3)),
        (2, 256): Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(64, 64, 8, 2), Tile(16, 32, 4, 3)),
        (4, 16): Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(16, 64, 8, 3)),
        (4, 32): Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(16, 32, 8, 3)),
        (4, 64): Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(16, 32, 8, 3)),
        (4, 128): Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 16, 8, 3)),
        (4, 256): Tiles(Tile(32, 32, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 2)),
    },
)
AMPERE = Architecture(
    166_912,
    False,
    HOPPER.tiles
    | {
        (2, 64): Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(16, 64, 4, 3)),
        (2, 128): Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 8, 2), Tile(16, 64, 4, 3)),
    },
)

ARCHITECTURES: dict[tuple[int, int], Architecture] = {
    (8, 0): AMPERE,
    (9, 0): HOPPER,
    (10, 0): HOPPER,
    (10, 3): HOPPER,
}
