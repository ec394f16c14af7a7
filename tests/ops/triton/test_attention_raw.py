"""Fused attention of raw heads, with their norms and rotation, against the oracle: output and every gradient."""

from __future__ import annotations

import pytest
import torch

from qknorm_tests.kernel_cases import Raw, raw_problem, shrink_tiles
from qknorm_tests.norm_cases import DOMINANT
from qknorm_tests.tiled_cases import Case

FULL, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
EACH = ("per_head", "per_head")
NOTHING = (0, "none")  # no rotation
CASES = [
    (Raw(), Case(causal=True), None),
    (
        Raw(norms=("layer", "l2"), head_dim=40, dtype=BRAIN, rotary=(40, "interleaved"), heads=(4, 1), layout="gaps"),
        Case(softcap=50.0, window=20),
        None,
    ),
    (
        Raw(norms=("l2", "l2"), head_dim=64, length=111, gains=EACH, rotary=(64, "half")),
        Case(causal=True, softcap=5.0),
        1.0,
    ),
    (
        Raw(norms=("lp", "layer"), head_dim=64, dtype=HALF, gains=("per_head", "scalar"), biases=("shared", "none")),
        Case(causal=True, window=20, softcap=100.0),
        None,
    ),
    (
        Raw(norms=("none", "rms"), head_dim=80, dtype=BRAIN, rotary=(80, "half"), gains=("none", "per_head")),
        Case(causal=True, softcap=50.0),
        None,
    ),
    (
        Raw(norms=("rms", "none"), head_dim=96, dtype=HALF, rotary=(96, "interleaved"), layout="heads", length=40),
        Case(),
        None,
    ),
    (Raw(norms=("none", "none"), head_dim=112, rotary=(56, "half"), length=40), Case(causal=True, softcap=5.0), None),
    (
        Raw(norms=("layer", "layer"), head_dim=128, dtype=BRAIN, biases=("shared", "per_head"), rotary=(128, "half")),
        Case(causal=True),
        None,
    ),
    (
        Raw(norms=("rms", "l2"), head_dim=256, length=40, dtype=BRAIN, rotary=(64, "half"), gains=EACH),
        Case(causal=True, softcap=50.0),
        None,
    ),
    (
        Raw(
            norms=("rms", "rms"),
            head_dim=64,
            dtype=BRAIN,
            heads=(7, 1),
            rotary=(64, "half"),
            batch=2,
            length=33,
            angles="all",
        ),
        Case(ranges="left_padding", softcap=50.0),
        None,
    ),
    (
        Raw(norms=("l2", "lp"), head_dim=64, rotary=NOTHING, gains=("scalar", "shared"), biases=("scalar", "none")),
        Case(ranges="packed"),
        1.0,
    ),
    (
        Raw(
            norms=("lp", "rms"),
            dtype=BRAIN,
            blend=0.3,
            p=1.5,
            length=111,
            rotary=(16, "half"),
            biases=("none", "shared"),
        ),
        Case(causal=True, softcap=5.0),
        None,
    ),
    (Raw(norms=("rms", "layer"), blend=1.0, gains=EACH, rotary=(16, "interleaved")), Case(window=9), None),
    (
        Raw(norms=("rms", "rms"), head_dim=128, length=33, dtype=HALF, heads=(6, 2), rotary=(128, "half")),
        Case(sinks=True, causal=True, window=20),
        None,
    ),
    (
        Raw(norms=("rms", "lp"), head_dim=64, length=33, dtype=BRAIN, heads=(6, 2), rotary=(64, "half"), biases=EACH),
        Case(sinks=True, softcap=50.0),
        None,
    ),
    (Raw(norms=("l2", "l2"), length=3, batch=2, gains=("none", "none"), rotary=(8, "half")), Case(softcap=50.0), 1.0),
]
CASES += [  # with a knee
    (Raw(heads=(4, 2), length=40, knee=4.0), Case(causal=True), None),
    (
        Raw(norms=("layer", "rms"), head_dim=64, length=40, dtype=BRAIN, rotary=(64, "half"), biases=EACH, knee=4.0),
        Case(causal=True, softcap=5.0),
        None,
    ),
    (Raw(norms=("l2", "lp"), length=40, dtype=HALF, p=1.5, gains=EACH, knee=0.5), Case(softcap=50.0), 1.0),
    (
        Raw(norms=("lp", "l2"), head_dim=40, length=40, dtype=BRAIN, rotary=(40, "interleaved"), knee=8.0),
        Case(window=20),
        1.0,
    ),
    (
        Raw(norms=("rms", "lp"), length=33, dtype=BRAIN, rotary=NOTHING, heads=(6, 2), knee=DOMINANT),
        Case(sinks=True, softcap=50.0),
        None,
    ),
    (Raw(norms=("lp", "layer"), length=33, p=3.0, gains=("scalar", "none"), knee=DOMINANT), Case(causal=True), 1.0),
    (
        Raw(head_dim=64, length=40, dtype=BRAIN, rotary=(64, "half"), heads=(4, 2), knee=1.0, sharpness=8),
        Case(causal=True, softcap=50.0),
        None,
    ),
    (Raw(norms=("layer", "lp"), length=40, gains=EACH, p=1.5, knee=1.0, sharpness=4), Case(causal=True), 1.0),
]


@pytest.mark.parametrize(("raw", "case", "scale"), CASES, ids=str)
def test_output_and_gradients(raw: Raw, case: Case, scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_tiles(monkeypatch)
    raw_problem(raw, case, scale).check()
