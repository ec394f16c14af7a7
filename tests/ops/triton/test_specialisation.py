"""Growing lengths compile no kernel anew: a cache grows with each token, and texts of a batch differ in length."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STEP = {"norm_rope_kernel": 1, "split_kernel": 1, "combine_kernel": 1}
GRADIENTS = {"row_terms_kernel": 1, "query_gradient_kernel": 1, "key_gradient_kernel": 1}
KERNELS = dict.fromkeys(  # none of them specialised
    [*STEP, *GRADIENTS, "forward_kernel", "gluon_forward_kernel", "norm_rope_gradient_kernel"], 0
)
TRAINING = GRADIENTS | {"norm_rope_kernel": 1, "forward_kernel": 1}


@pytest.mark.slow
def test_a_kernel_serves_every_length() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "tests" / "qknorm_tests" / "growing.py"), "90"]
    run = subprocess.run(
        command, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout) == {
        "decode": STEP,
        "train": TRAINING,
        "prefill": GRADIENTS | {"forward_kernel": 1, "split_kernel": 1, "combine_kernel": 1},
        "lengths of": KERNELS,
    }
