"""The GPUs that the kernels run on: how they load tiles, how much shared memory they have, and the sizes of tiles.

Without Triton, too: the operators' checks name the GPUs.
"""

from __future__ import annotations

from typing import Final, NamedTuple

CAP_WITHOUT_MAXIMUM = 64.0  # up to it the softmax needs no maximum: see ops/README.md
# Of few queries over many keys, as `attention_decode` takes them:
MOST_ROWS = 64  # of a tile; up to this many queries of a group's heads, one tile holds them all
MOST_QUERIES = 1024  # of a group's heads: from here on tiles of one head's queries fill the processors
LEAST_KEYS = 256  # of a program: with fewer it takes longer to start than to read


class Tile(NamedTuple):
    """Queries and keys of a tile, and the numbers of warps and pipeline stages of its kernel.

    `apart` computes dk and dv in a launch each: both do not fit the registers. `one_loop` masks all tiles of dk and dv:
    a loop of its own for tiles without a mask does not fit. `unhoisted` computes what is the same for all tiles of a
    loop of gradients, such as the descriptors of matrix instructions, anew for each: kept, it does not fit the
    registers with Triton 3.6.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    apart: bool = False
    one_loop: bool = False
    unhoisted: bool = False


class Tiles(NamedTuple):
    """The tiles of each kernel; of `decode`, `queries` is the least number of rows."""

    forward: Tile
    query_gradient: Tile
    key_gradient: Tile
    decode: Tile


# By the size of a number in bytes, and head_dim rounded up to a power of two. Of fp32, wide heads spill registers.
Table = dict[tuple[int, int], Tiles]
FP32: Table = {
    (4, 16): Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2, one_loop=True), Tile(16, 64, 8, 3)),
    (4, 32): Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2, one_loop=True), Tile(16, 32, 8, 3)),
    (4, 64): Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2, one_loop=True), Tile(16, 32, 8, 3)),
    (4, 128): Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1, one_loop=True), Tile(16, 16, 8, 3)),
    (4, 256): Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1, one_loop=True), Tile(16, 16, 8, 2)),
}
# The fastest of the tiles that were measured on an H100 at head_dim 64, 128 and 256: see the page on tiles. Two or
# more programs of 4 warps share a processor: one computes weights while another's products run.
HOPPER: Table = FP32 | {
    (2, 16): Tiles(Tile(128, 128, 8, 3), Tile(128, 128, 8, 2), Tile(64, 128, 8, 2), Tile(16, 64, 4, 3)),
    (2, 32): Tiles(Tile(128, 128, 8, 3), Tile(128, 128, 8, 2), Tile(64, 128, 8, 2), Tile(16, 128, 4, 3)),
    (2, 64): Tiles(Tile(64, 64, 4, 2), Tile(64, 32, 4, 3), Tile(128, 64, 4, 2, unhoisted=True), Tile(16, 128, 4, 3)),
    (2, 128): Tiles(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 64, 4, 2, unhoisted=True), Tile(16, 64, 4, 3)),
    (2, 256): Tiles(
        Tile(128, 64, 8, 2),
        Tile(64, 32, 4, 3, unhoisted=True),
        Tile(32, 64, 4, 3, apart=True, unhoisted=True),
        Tile(16, 32, 4, 3),
    ),
}
# For 99 KB of shared memory, which no measurement chose.
SMALL: Table = FP32 | {
    (2, 16): Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 128, 8, 2), Tile(16, 64, 4, 3)),
    (2, 32): Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 128, 8, 2), Tile(16, 128, 4, 3)),
    (2, 64): Tiles(Tile(64, 64, 4, 2), Tile(128, 32, 8, 2), Tile(32, 128, 8, 2), Tile(16, 64, 4, 3)),
    (2, 128): Tiles(Tile(128, 32, 8, 2), Tile(128, 16, 8, 2), Tile(64, 64, 8, 2, one_loop=True), Tile(16, 32, 4, 3)),
    (2, 256): Tiles(
        Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2, apart=True, one_loop=True), Tile(16, 16, 4, 3)
    ),
}


class Architecture(NamedTuple):
    """A class of GPUs: its tiles, the bytes of shared memory that a program may take, whether descriptors are read by
    a copy engine (TMA).
    """

    tiles: Table
    shared: int
    descriptors: bool


ARCHITECTURES: Final[dict[tuple[int, int], Architecture]] = {  # by compute capability
    (8, 0): Architecture(SMALL, 166_912, descriptors=False),
    (8, 6): Architecture(SMALL, 101_376, descriptors=False),
    (8, 9): Architecture(SMALL, 101_376, descriptors=False),
    (9, 0): Architecture(HOPPER, 232_448, descriptors=True),
    (10, 0): Architecture(HOPPER, 232_448, descriptors=True),
    (10, 3): Architecture(HOPPER, 232_448, descriptors=True),
    (12, 0): Architecture(SMALL, 101_376, descriptors=True),
    (12, 1): Architecture(SMALL, 101_376, descriptors=True),
}
