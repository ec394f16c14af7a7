"""Tables of attention problems: one for every implementation, and one of small problems for Triton's interpreter."""

import torch

from qknorm_tests.attention_cases import Case
from qknorm_tests.covering import covering
from qknorm_tests.norm_cases import CASES as RAWS

F32, BF16, F16 = DTYPES = torch.float32, torch.bfloat16, torch.float16
CAUSAL, CAPS, WIDE = (True, False), (None, 50.0), {"queries": 111, "head_dim": 64}
MASKS = (
    *(f"bool:{axes}" for axes in ("BHTS", "B1TS", "1HTS", "11TS", "B11S", "1H1S", "111S", "BHT1", "11T1")),
    *(f"{kind}:{axes}" for kind in ("add", "inf") for axes in ("BHTS", "B1TS", "1HTS", "11TS", "B11S", "BHT1")),
    *("left_padding", "right_padding", "packed", "nothing"),
)
LENGTH_CASES = [
    *(Case(queries=n, causal=causal, softcap=cap) for n, causal, cap in covering((2, 63, 64, 65, 111), CAUSAL, CAPS)),
    *(Case(batch=1, heads=2, heads_kv=1, queries=1000, causal=True, softcap=cap) for cap in CAPS),
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
    *(Case(queries=111, causal=c, window=w) for w, c in covering((1, 2, 20, 64, 110, 500), CAUSAL, strength=1)),
    *(Case(**WIDE, causal=True, softcap=cap, spread=x) for cap in (None, 5.0, 64.0, 70.0) for x in (0.3, 3.0, 8.0)),
    *(Case(**WIDE, softcap=cap, mask=mask, spread=40.0) for cap, mask in ((None, None), (5.0, "add:BHTS"))),
    *(
        Case(queries=80, mask=mask, softcap=cap, causal=causal, window=window)
        for mask, cap, (causal, window) in covering(MASKS, (70.0, None), ((False, None), (True, 30)), strength=1)
    ),
    *(
        Case(softcap=cap, causal=True, mask=mask, sinks=not dropout, dropout=dropout)
        for cap, mask, dropout in covering((None, 5.0, 70.0), (None, "bool:B1TS"), (0.0, 0.3))
    ),
    *(Case(queries=80, causal=True, window=30, mask=f"bool:{axes}") for axes in ("BHT1", "B11S")),
    *(Case(queries=111, keys=63, causal=True, **options) for options in ({"sinks": True}, {"dropout": 0.3})),
    Case(heads=14, queries=111, causal=True, window=30, softcap=70.0, mask="add:B1TS", sinks=True, dropout=0.1),
]
RANGE_CASES = [
    Case(queries=queries, keys=keys, ranges=kind, **options)
    for kind, (queries, keys), options in covering(
        ("left_padding", "right_padding", "packed", "window", "shared", "nothing"),
        ((1, None), (150, None), (1, 63), (65, 200), (111, 63)),
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
TABLE = [*LENGTH_CASES, *SHAPE_CASES, *OPTION_CASES, *RANGE_CASES]
ONE, PAIR = {"batch": 1, "heads": 2, "heads_kv": 1}, {"heads": 2, "heads_kv": 1, "queries": 40}
THREES, FAR = {"batch": 1, "heads": 6, "heads_kv": 2, "queries": 40}, 2**31 - 1
SMALL = [  # for Triton's interpreter
    (Case(batch=1, queries=40), F32),
    (Case(**ONE, queries=1, keys=63, causal=True, head_dim=64), BF16),
    (Case(**ONE, queries=111, causal=True, head_dim=40, softcap=50.0), F16),
    (Case(batch=1, heads=2, heads_kv=2, queries=40, head_dim=80, softcap=5.0), BF16),
    (Case(batch=1, heads=3, heads_kv=1, queries=40, head_dim=96, causal=True, softcap=100.0), F32),
    (Case(batch=1, heads=7, heads_kv=1, queries=20, head_dim=112, causal=True), F16),
    (Case(batch=1, heads=5, heads_kv=1, queries=33, softcap=5.0), F16),
    (Case(**ONE, queries=40, head_dim=256), BF16),
    (Case(**ONE, queries=111, keys=63, causal=True, softcap=50.0, head_dim=80), BF16),
    (Case(**ONE, queries=64, keys=2, softcap=100.0), F32),
    (Case(**ONE, queries=111, causal=True, window=2, softcap=5.0), BF16),
    (Case(**ONE, window=9, head_dim=96), BF16),
    (Case(**ONE, causal=True, window=500, head_dim=40), F32),
    (Case(**ONE, queries=80, keys=40, window=20), F16),
    (Case(**ONE, queries=40, keys=80, causal=True, window=20, softcap=50.0), F16),
    (Case(**ONE, queries=40, window=FAR), F32),
    (Case(**ONE, keys=40, causal=True, window=FAR, softcap=50.0), BF16),
    (Case(**PAIR, ranges="left_padding", softcap=50.0), BF16),
    (Case(**PAIR, ranges="packed", keys=63, causal=True, window=7), BF16),
    (Case(**PAIR, ranges="right_padding", keys=63, softcap=5.0, sinks=True), F32),
    (Case(**PAIR | {"queries": 80}, ranges="window", keys=63), BF16),
    (Case(**PAIR, ranges="shared", softcap=5.0), F16),
    (Case(**THREES, sinks=True, causal=True, window=20), BF16),
    (Case(**THREES, sinks=True, keys=33, causal=True, softcap=5.0), F32),
    (Case(**THREES, sinks=True, ranges="packed", head_dim=40), F32),
    (Case(**ONE, queries=40, keys=33, head_dim=192, softcap=50.0), BF16),
    (Case(**ONE, queries=1), F32),  # a single key
    (Case(**ONE, queries=40, head_dim=32, causal=True, dropout=0.3), F32),
    (Case(**ONE, queries=33, head_dim=40, softcap=5.0, sinks=True, dropout=0.1), F16),
    (Case(**PAIR | {"queries": 24}, head_dim=24, ranges="packed", dropout=0.3), F16),
    (Case(**THREES, spread=5.0, ranges="left_padding"), F32),  # one fp32 number for its log-sum-exp would not suffice
    *((Case(**ONE, queries=40, causal=True, softcap=cap, spread=12.0), BF16) for cap in (None, 5.0, 64.0)),
]
NORMED = covering(
    [raw._replace(length=min(raw.length, 34)) for raw in RAWS if raw.spread == 1][::3],
    [
        Case(causal=True, softcap=50.0),
        Case(causal=True, window=20, softcap=100.0),
        Case(softcap=5.0, dropout=0.3),
        Case(ranges="left_padding"),
        Case(sinks=True, softcap=50.0),
    ],
    strength=1,
)
