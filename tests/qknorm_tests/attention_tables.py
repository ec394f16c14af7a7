"""Tables of attention problems, for every implementation."""

from __future__ import annotations

from qknorm_tests.covering import covering
from qknorm_tests.tiled_cases import Case

LENGTHS = (1, 63, 64, 65, 111, 128, 129)
MASKS = (
    *(f"bool:{axes}" for axes in ("BHTS", "B1TS", "1HTS", "11TS", "B11S", "1H1S", "111S", "BHT1", "11T1")),
    *(f"{kind}:{axes}" for kind in ("add", "inf") for axes in ("BHTS", "B1TS", "1HTS", "11TS", "B11S", "BHT1")),
    *("left_padding", "right_padding", "packed", "nothing"),
)
CAUSAL, CAPS = (True, False), (None, 50.0)
LENGTH_CASES = [
    *(Case(queries=n, causal=causal, softcap=cap) for n, causal, cap in covering(LENGTHS, CAUSAL, CAPS)),
    *(Case(batch=1, heads=2, heads_kv=1, queries=1000, causal=True, softcap=cap) for cap in (None, 50.0)),
    Case(batch=1, heads=2, heads_kv=1, queries=1000, window=200),
    Case(batch=1, heads=2, heads_kv=1, queries=1000, causal=True, window=200, mask="bool:11TS"),
]
SHAPE_CASES = [
    *(Case(head_dim=d, causal=True, softcap=50.0) for d in (16, 40, 64, 80, 96, 128, 256)),
    *(
        Case(heads=group * heads_kv, heads_kv=heads_kv, queries=n, causal=True, softcap=cap)
        for group, heads_kv, n, cap in covering((1, 4, 7), (1, 2), (63, 111), CAPS)
    ),
    *(
        Case(queries=queries, keys=keys, causal=causal, window=window, softcap=cap)
        for (queries, keys), causal, window, cap in covering(
            ((1, 63), (1, 111), (5, 111), (64, 128), (65, 200), (111, 63), (200, 3)), CAUSAL, (None, 20), CAPS
        )
    ),
]
OPTION_CASES = [
    *(
        Case(queries=111, causal=causal, window=w)
        for w, causal in covering((1, 2, 20, 64, 110, 111, 500), CAUSAL, strength=1)
    ),
    *(Case(softcap=cap, causal=True, spread=spread) for cap in (5.0, 50.0, 64.0, 70.0) for spread in (1.0, 50.0)),
    *(
        Case(queries=80, mask=mask, softcap=cap, causal=causal, window=window)
        for mask, cap, (causal, window) in covering(MASKS, (70.0, None), ((False, None), (True, 30)), strength=1)
    ),
    *(
        Case(softcap=cap, causal=True, mask=mask, sinks=not dropout, dropout=dropout)
        for cap, mask, dropout in covering((None, 5.0, 70.0), (None, "bool:B1TS"), (0.0, 0.3))
    ),
    Case(queries=111, keys=63, causal=True, sinks=True),
    Case(queries=111, keys=63, causal=True, dropout=0.3),
    Case(heads=14, queries=111, causal=True, window=30, softcap=70.0, mask="add:B1TS", sinks=True, dropout=0.1),
]
RANGES = ("left_padding", "right_padding", "packed", "window", "shared", "nothing")
RANGE_CASES = [
    Case(queries=queries, keys=keys, ranges=kind, **options)
    for kind, (queries, keys), options in covering(
        RANGES,
        ((1, None), (63, None), (150, None), (1, 63), (65, 200), (111, 63)),
        (
            {"softcap": 50.0},
            {"batch": 3},
            {"causal": True, "window": 30, "sinks": True},
            {"mask": "bool:B1TS", "softcap": 5.0},
            {"mask": "add:B11S", "window": 40},
            {"heads": 14, "dropout": 0.3, "softcap": 70.0},
        ),
    )
]
