"""Here so that this folder is on the path: tests in folders below draw their problems from `tiled_cases` too."""

import pytest

from hf_qknorm.ops import operators


@pytest.fixture(autouse=True)
def forget_plans() -> None:
    """Each test records its own launches, with the settings that it replaces."""
    operators._repeating.cache_clear()
