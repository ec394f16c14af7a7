"""The package's log, to which one process writes."""

from __future__ import annotations

import logging
import os
import sys
from typing import Final

logger: Final = logging.getLogger("hf_qknorm")


def is_first_rank() -> bool:
    """Whether this process is the one that writes and logs: rank 0 of torch.distributed, or of torchrun before it."""
    distributed = sys.modules.get("torch.distributed")  # the command's help needs no torch
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return os.environ.get("RANK") in (None, "", "0")


logger.addFilter(lambda record: is_first_rank())
