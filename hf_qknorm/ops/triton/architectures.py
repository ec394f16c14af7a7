"""The GPUs that the kernels run on: how they load tiles, how much shared memory they have, and the sizes of tiles.

Without Triton, too: the self-checks name the code of a call by the limits here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

CAP_WITHOUT_MAXIMUM = 64.0  # up to it the softmax needs no maximum: see ops/README.md
# Of few queries over many keys, as `attention_decode` takes them:
MOST_ROWS = 64  # of a tile; up to this many queries of a group's heads, one tile holds them all
MOST_QUERIES = 1024  # of a group's heads: from here on tiles of one head's queries fill the processors
LEAST_KEYS = 256  # of a program: with fewer it takes longer to start than to read


class Tile(NamedTuple):
    """Queries and keys of a tile, and the numbers of warps and pipeline stages of its kernel.

    `apart` computes dk and dv in a launch each: both do not fit the registers. `one_loop` masks all tiles of dk and dv:
    a loop of its own for tiles without a mask does not fit. `split` divides the columns of a head in two parts, see
    `launch.split`. `unhoisted` computes what is the same for all tiles of a loop of gradients, such as the descriptors
    of matrix instructions, anew for each: kept, it does not fit the registers with Triton 3.6.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    apart: bool = False
    split: bool = False
    one_loop: bool = False
    unhoisted: bool = False

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
    """A class of GPUs; `tiles` by the size of a number in bytes, and head_dim rounded up to a power of two.

    `split` holds the tiles for heads in two parts, where these have fewer columns. `dropout` holds the tiles that
    differ with dropout, whose random numbers take registers.
    """

    shared: int  # bytes of shared memory that a program may take
    descriptors: bool  # whether a copy engine (TMA) reads tensor descriptors
    tiles: dict[tuple[int, int], Tiles]
    split: dict[tuple[int, int], dict[str, Tile]]
    dropout: dict[tuple[int, int], dict[str, Tile]]


# For every GPU; wide heads spill registers.
FP32: dict[tuple[int, int], Tiles] = {
    (4, 16): Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(16, 64, 8, 3)),
    (4, 32): Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(16, 32, 8, 3)),
    (4, 64): Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(16, 32, 8, 3)),
    (4, 128): Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(16, 16, 8, 3)),
    (4, 256): Tiles(Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 2)),
}
# B200 and B300, which no measurement chose: in half precision no registers spill, and the shared memory holds at least
# one program; of `decode` two, with 64 KiB on their way: more than memory's latency needs.
BLACKWELL = Architecture(
    232_448,
    True,
    {
        (2, 16): Tiles(Tile(128, 128, 8, 3), Tile(128, 128, 8, 2), Tile(64, 128, 8, 2), Tile(16, 64, 4, 3)),
        (2, 32): Tiles(Tile(128, 128, 8, 3), Tile(128, 128, 8, 2), Tile(64, 128, 8, 2), Tile(16, 128, 4, 3)),
        (2, 64): Tiles(Tile(128, 128, 8, 3), Tile(128, 128, 8, 2), Tile(64, 128, 8, 2), Tile(16, 128, 4, 3)),
        (2, 128): Tiles(Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(16, 64, 4, 3)),
        (2, 256): Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(64, 64, 4, 2, apart=True), Tile(16, 32, 4, 3)),
    }
    | FP32
    | {(4, 256): FP32[4, 256]._replace(forward=Tile(32, 32, 8, 1))},
    {
        (2, 128): {
            "forward": Tile(128, 128, 8, 2, split=True),
            "query_gradient": Tile(128, 64, 8, 2, split=True),
            "key_gradient": Tile(64, 128, 8, 2, split=True),
        },
        (2, 256): {  # of dq in two parts, 64 keys would not fit the shared memory with Triton 3.6
            "forward": Tile(128, 64, 8, 2, split=True),
            "query_gradient": Tile(128, 32, 4, 2, split=True),
            "key_gradient": Tile(64, 64, 4, 2, apart=True, split=True),
        },
    },
    {
        **{(2, columns): {"query_gradient": Tile(128, 64, 8, 2)} for columns in (16, 32, 64)},
        (2, 128): {"key_gradient": Tile(32, 128, 8, 2)},
        (2, 256): {"key_gradient": Tile(32, 64, 4, 2, apart=True)},
    },
)
# H100 and H200: the fastest of the measured tiles, see the page on tiles. Two or more programs of 4 warps
# share a processor: one computes weights while another's products run.
HOPPER = BLACKWELL._replace(
    tiles=BLACKWELL.tiles
    | {
        (2, 64): Tiles(
            Tile(64, 64, 4, 2), Tile(64, 32, 4, 3), Tile(128, 64, 4, 2, unhoisted=True), Tile(16, 128, 4, 3)
        ),
        (2, 128): Tiles(
            Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 64, 4, 2, unhoisted=True), Tile(16, 64, 4, 3)
        ),
        (2, 256): Tiles(
            Tile(128, 64, 8, 2),
            Tile(64, 32, 4, 3, unhoisted=True),
            Tile(32, 64, 4, 3, apart=True, unhoisted=True),
            Tile(16, 32, 4, 3),
        ),
    },
    split={
        (2, 128): {
            "forward": Tile(128, 64, 4, 2, split=True),
            "query_gradient": Tile(64, 32, 4, 3, split=True),
            "key_gradient": Tile(64, 64, 4, 3, split=True),
        },
        (2, 256): {
            "forward": Tile(128, 64, 8, 2, split=True),
            "query_gradient": Tile(128, 64, 8, 2, split=True, unhoisted=True),
            "key_gradient": Tile(64, 64, 4, 2, apart=True, split=True, unhoisted=True),
        },
    },
    dropout=BLACKWELL.dropout | {(2, 64): {"query_gradient": Tile(128, 64, 8, 2), "key_gradient": Tile(64, 128, 8, 2)}},
)
AMPERE = Architecture(
    166_912,
    False,
    {
        (2, 16): Tiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(16, 64, 4, 3)),
        (2, 32): Tiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(16, 128, 4, 3)),
        (2, 64): Tiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(16, 64, 4, 3)),
        (2, 128): Tiles(Tile(128, 32, 8, 2), Tile(128, 32, 8, 2), Tile(64, 64, 8, 2), Tile(16, 32, 4, 3)),
        (2, 256): Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 8, 2), Tile(32, 64, 4, 2, apart=True), Tile(16, 16, 4, 3)),
    }
    | FP32,
    {
        (2, 128): {
            "forward": Tile(128, 32, 8, 2, split=True),
            "query_gradient": Tile(128, 32, 8, 2, split=True),
            "key_gradient": Tile(32, 128, 8, 2, split=True),
        },
        (2, 256): {
            "forward": Tile(128, 16, 8, 2, split=True),
            "query_gradient": Tile(128, 16, 8, 2, split=True),
            "key_gradient": Tile(32, 128, 8, 2, apart=True, split=True),
        },
    },
    {(2, 128): {"forward": Tile(128, 64, 8, 2)}},
)
# RTX 30 and 40, L40S: Ampere's tiles, but where they would spill for sm_89, or not fit the shared memory. Of 32 queries
# and 32 keys, 8 warps would compute each score twice.
ADA = Architecture(
    101_376,
    False,
    AMPERE.tiles
    | {
        (2, 128): AMPERE.tiles[2, 128]._replace(query_gradient=Tile(64, 64, 8, 2)),
        (2, 256): AMPERE.tiles[2, 256]._replace(
            query_gradient=Tile(32, 32, 4, 2), key_gradient=Tile(32, 32, 4, 2, apart=True)
        ),
    },
    AMPERE.split
    | {
        (2, 256): {
            "forward": Tile(128, 16, 8, 2, split=True),
            "query_gradient": Tile(64, 16, 4, 2, split=True),
            "key_gradient": Tile(32, 64, 4, 2, apart=True, split=True),
        },
    },
    AMPERE.dropout,
)
# Blackwell without tensor memory: RTX 50 and DGX Spark.
CONSUMER_BLACKWELL = Architecture(
    101_376,
    True,
    {
        (2, 16): Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 128, 8, 2), Tile(16, 64, 4, 3)),
        (2, 32): Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 128, 8, 2), Tile(16, 128, 4, 3)),
        (2, 64): Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 128, 8, 2), Tile(16, 64, 4, 3)),
        (2, 128): Tiles(
            Tile(128, 64, 8, 2), Tile(128, 16, 8, 2), Tile(64, 64, 8, 2, one_loop=True), Tile(16, 32, 4, 3)
        ),
        (2, 256): Tiles(
            Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2, apart=True, one_loop=True), Tile(16, 16, 4, 3)
        ),
    }
    | FP32,
    {  # in two parts the other kernels spill hundreds of bytes
        (2, 128): {
            "forward": Tile(128, 64, 8, 2, split=True),
            "query_gradient": Tile(128, 16, 8, 2, split=True),
        },
        (2, 256): {"forward": Tile(128, 16, 8, 2, split=True)},
    },
    {(2, columns): {"key_gradient": Tile(32, 128, 8, 2, one_loop=True)} for columns in (16, 32, 64)},
)

ARCHITECTURES: dict[tuple[int, int], Architecture] = {  # by compute capability
    (8, 0): AMPERE,
    (8, 6): ADA,
    (8, 9): ADA,
    (9, 0): HOPPER,
    (10, 0): BLACKWELL,
    (10, 3): BLACKWELL,
    (12, 0): CONSUMER_BLACKWELL,
    (12, 1): CONSUMER_BLACKWELL,
}
