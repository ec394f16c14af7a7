"""Whether transformers adds PEFT's adapters here."""

from __future__ import annotations

import peft
import pytest
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION

# A mark, of a test or of one of its cases: transformers 5.24 needs PEFT 0.22.
needs_add_adapter = pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"add_adapter of this transformers needs PEFT {MIN_PEFT_VERSION}, and this is {peft.__version__}",
)
