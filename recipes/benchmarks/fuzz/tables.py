"""The table of operators: all that each relies on, by argument. The operators check it; the fuzz breaks each line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from fuzz.lines import FLOATING, HEADS, OF_Q, Line, Number, Table, Values, is_finite
from hf_qknorm.ops.cpu.norm_rope import KINDS

MOST_COLUMNS: Final = 256


def _window(x: Any, values: Values) -> bool:
    return x is None or x >= int(values["causal"])


COLUMNS: Final = (f"H ≥ 1, 1 ≤ D ≤ {MOST_COLUMNS}", lambda s, values: s["H"] >= 1 and 1 <= s["D"] <= MOST_COLUMNS)
GROUPS: Final = ("H a multiple of Hk", lambda s, values: s["Hk"] >= 1 and s["H"] % s["Hk"] == 0)
LIKE_COS: Final = ("of the shape of cos", lambda s, values: values["sin"].shape == values["cos"].shape)
ROTATES: Final = ("2R ≤ D", lambda s, values: 2 * s["R"] <= s["D"])
SWITCH: Final = Number("true or false", lambda x, values: isinstance(x, bool))
Q: Final = Line("B H T D", HEADS, limits=(COLUMNS,))
KEYS: Final = Line("B Hk S D", OF_Q)
COS: Final = Line("B/1 T R", FLOATING, optional=True, beside="sin", limits=(ROTATES,))
SIN: Final = replace(COS, beside="cos", limits=(LIKE_COS,))


def _seeded(x: Any, values: Values) -> bool:
    return is_finite(x) and 0 <= x < 1 and (x == 0 or values["seed"] is not None)


ATTENTION: Final[Table] = {
    "q": Q,
    "k": replace(KEYS, limits=(GROUPS, ("S ≤ 2²⁴", lambda s, values: s["S"] <= 1 << 24))),
    "v": KEYS,
    "ranges": Line("B/1 T 2", "int32", optional=True),
    "sinks": Line("H", FLOATING, optional=True),
    "seed": Line("1", "int64", optional=True),
    "scale": Number("finite", lambda x, values: is_finite(x)),
    "cap": Number("finite, above 0, or none", lambda x, values: x is None or (is_finite(x) and x > 0)),
    "causal": SWITCH,
    "window": Number("≥ 1 with causality, ≥ 0 without, or none", _window),
    "dropout": Number("in [0, 1), with a seed above 0", _seeded),
}
LIKE_Q: Final = Line("B H T D", OF_Q)


def norm(side: str, heads: str) -> Table:
    """The arguments of a norm of queries or keys, which are not read without them."""
    parameter = Line(f"1 | D | {heads} D", FLOATING, optional=True, of=side)
    return {
        f"{side}_kind": Number("none, rms, layer or l2", lambda x, values: x in KINDS or values[side] is None),
        f"{side}_gain": parameter,
        f"{side}_bias": parameter,
        f"{side}_eps": Number("≥ 0", lambda x, values: x >= 0 or values[side] is None),
        f"{side}_knee": Line("3", HEADS, optional=True, of=side),
    }


NORM_ROPE: Final[Table] = {
    "q": Q,
    "k": Line("B Hk T D", OF_Q, optional=True, limits=(("Hk ≥ 1", lambda s, values: s["Hk"] >= 1),)),
    **norm("q", "H"),
    **norm("k", "Hk"),
    "cos": COS,
    "sin": SIN,
    "interleaved": SWITCH,
}
CPP: Final[dict[str, Table]] = {
    "forward": ATTENTION | {"gradients": SWITCH},
    "measure": {name: line for name, line in ATTENTION.items() if name != "dropout"},
    "backward": ATTENTION
    | {
        "grad": LIKE_Q,
        "out": LIKE_Q,
        "normaliser": Line("B H T 2", "fp32"),
        "parts": Number("from 1 to 2²⁴", lambda x, values: 1 <= x <= 1 << 24),
    },
    "norm_rope": NORM_ROPE,
    "norm_rope_backward": NORM_ROPE | {"dq": LIKE_Q, "dk": Line("B Hk T D", OF_Q, optional=True, beside="k")},
}
