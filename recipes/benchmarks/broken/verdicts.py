"""Verdicts on outcomes: right, refused, silent as transformers is, or a fault of ours."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

RIGHT, REFUSED, SILENT, OWN = "right", "refused, named", "transformers is silent", "transformers' own error"
WRONG, UNNAMED, HANG, CRASH = "WRONG", "unnamed error", "hang", "crash"
OUTCOMES = (RIGHT, REFUSED, SILENT, OWN, WRONG, UNNAMED, HANG, CRASH)
FAULTS = (WRONG, UNNAMED, HANG, CRASH)
FILES = re.compile(r"config\.json|generation_config|\.safetensors|index\.json|tokenizer|\.bin\b|adapter_config")
LAYER = re.compile(r"\w\.\d+\.\w")  # a part of a layer, as model.layers.1.self_attn
FIELDS = re.compile(r"\b[a-z]+_[a-z_]+\b")  # a word that only a field or a tensor can be
TOLERANCE = {"torch.float32": 1e-4, "torch.float64": 1e-4}


@dataclass(frozen=True)
class Verdict:
    outcome: str
    why: str = ""


def close(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two answers have the same logits, up to rounding; NaN equals NaN."""
    if a.get("kind") != "done" or b.get("kind") != "done" or len(a["logits"]) != len(b["logits"]):
        return False
    tolerance = max(TOLERANCE.get(one["dtype"], 0.05) for one in (a, b))
    finite = [abs(x) for x in b["logits"] if math.isfinite(x)]
    size = max(finite, default=0.0)

    def same(x: float, y: float) -> bool:
        if not (math.isfinite(x) and math.isfinite(y)):
            return x == y or (math.isnan(x) and math.isnan(y))
        return abs(x - y) <= tolerance * max(size, 1e-6)

    return all(map(same, a["logits"], b["logits"]))


def named(answer: dict[str, Any], names: tuple[str, ...], fields: frozenset[str]) -> bool:
    """Whether an error names a file, the changed field or tensor, or another field of the config."""
    text = answer["text"]
    if FILES.search(text) or LAYER.search(text) or any(name and name in text for name in names):
        return True
    return bool(fields & {*FIELDS.findall(text)})


def failed(answer: dict[str, Any], names: tuple[str, ...], fields: frozenset[str]) -> Verdict:
    """Return the verdict on an answer that is not a success."""
    if answer["kind"] in ("hang", "crash"):
        return Verdict(HANG if answer["kind"] == "hang" else CRASH, answer["text"])
    said = f"{answer['type']} at {answer['place']}: {answer['text'].strip().partition(chr(10))[0][:160]}"
    if not named(answer, names, fields):
        return Verdict(UNNAMED, said)
    if not answer["one_line"]:
        return Verdict(UNNAMED, f"a traceback: {said}")
    return Verdict(REFUSED, said)
