"""Other random numbers for the whole suite: `pytest --seed N` adds N to every seed that torch gets.

The option reaches child processes through the environment: a script that must draw its test's numbers imports this.
"""

import os
from typing import Any

import torch


def _shift(offset: int) -> None:
    seed_all, plain = torch.manual_seed, torch.Generator

    class Generator(plain):  # type: ignore[misc, valid-type]
        def manual_seed(self, seed: int) -> Any:
            return super().manual_seed(seed + offset)

    torch.manual_seed = lambda seed: seed_all(int(seed) + offset)
    torch.Generator = Generator  # type: ignore[misc]


def fixed(seed: int) -> int:
    """The seed that gives the numbers of `seed` whatever `--seed` is: for samples of which a result is published."""
    return seed - _OFFSET


_OFFSET = int(os.environ.get("HF_QKNORM_TEST_SEED", "0"))
if _OFFSET:
    _shift(_OFFSET)
