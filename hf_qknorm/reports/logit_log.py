"""The samples of `LogitMonitor`, and the JSONL files that hold them, a line for each sampled step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from hf_qknorm.files.paths import user_path
from hf_qknorm.files.untrusted import read_bytes
from hf_qknorm.reports.records import FORMAT, STRICT, Count, LayerStatistics, Name, read_json

DIGITS = 5  # significant digits of the numbers in the file
BYTES = 2**30  # of a log: a sample of 100 layers with 128 heads has 0.9 MB
SHOWN = ("attention/max_logit", "attention/min_entropy", "attention/max_bound")  # in the Trainer's own log


@dataclass(frozen=True)
class LogitSample:
    """All layers at a step, by name. `step` is the number under which the Trainer logs the loss."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    step: Count
    layers: Annotated[dict[Name, LayerStatistics], Field(min_length=1, max_length=10_000)]
    format: Literal[1] = field(default=FORMAT, repr=False, kw_only=True)

    def heads(self) -> Iterator[tuple[str, int, float, float]]:
        """The layer, the number, the largest |logit| and the entropy of each head."""
        for name, layer in self.layers.items():
            for head, numbers in enumerate(zip(layer.max_logit, layer.entropy, strict=True)):
                yield name, head, *numbers

    def __str__(self) -> str:
        name, head, largest, _ = max(self.heads(), key=lambda found: nan_as_inf(found[2]))
        sharp_name, sharp_head, _, least = max(self.heads(), key=lambda found: nan_as_inf(-found[3]))
        bound = self.summary().get("attention/max_bound")
        bounded = "" if bound is None else f", largest bound {bound:.4g}"
        return (
            f"step {self.step}: largest |logit| {largest:.4g} ({name}, head {head}), "
            f"least entropy {least:.3g} nats ({sharp_name}, head {sharp_head}){bounded}"
        )

    def summary(self) -> dict[str, float]:
        """The largest |logit| and the least entropy of any head, and the largest bound of any layer that has one."""
        return {name: value for name, value in self.scalars().items() if name in SHOWN}

    def scalars(self) -> dict[str, float]:
        """The numbers for a logger: the largest of any head, of entropies the least, and each layer's largest |logit|.

        NaN counts as the worst.
        """
        found = {}
        for name in (each.name for each in fields(LayerStatistics) if each.name not in ("cap", "even")):
            values = [getattr(layer, name) for layer in self.layers.values()]
            rows = [value if isinstance(value, tuple) else (value,) for value in values if value is not None]
            numbers = [x for row in rows for x in row]
            if name == "entropy":
                found["attention/min_entropy"] = -max((-x for x in numbers), key=nan_as_inf)
            elif numbers:
                found[f"attention/max_{name.removeprefix('max_')}"] = max(numbers, key=nan_as_inf)
        largest = (max(layer.max_logit, key=nan_as_inf) for layer in self.layers.values())
        return found | {f"attention/max_logit/{i}": value for i, value in enumerate(largest)}

    def line(self) -> str:
        """The sample as a line of JSON, with five significant digits."""
        text = json.dumps({"format": self.format, **SAMPLE.dump_python(self, mode="json", exclude_defaults=True)})
        rounded = json.loads(text, parse_float=lambda digits: float(f"{float(digits):.{DIGITS}g}"))
        return json.dumps(rounded, separators=(",", ":")) + "\n"

    @classmethod
    def from_line(cls, line: bytes) -> LogitSample:
        """The inverse of `line`. Raises ValueError, naming the key, for anything else, and what can't be drawn."""
        sample = read_json(SAMPLE, line, "sample")
        for name, layer in sample.layers.items():
            if not 1e-6 <= layer.cap <= 1e6 or not 0 <= layer.even <= 100:
                raise ValueError(
                    f"sample.layers.{name} has cap {layer.cap:g}, expected 1e-6 to 1e6, and even {layer.even:g}, "
                    "expected 0 to 100 nats"
                )
        return sample


SAMPLE = TypeAdapter(LogitSample)


def read_log(path: str | Path) -> list[LogitSample]:
    """Read the samples of a JSONL file, by step.

    Where a resumed run took a step again, its sample counts; of several runs, the last one's. A last line without an
    end, from a killed run, is ignored.

    Raises FileNotFoundError, and ValueError, naming file and line, for a file that is too large or not from
    `LogitMonitor`.
    """
    given, path = path, user_path(path, "the log's path")
    if not path.exists():
        raise FileNotFoundError(f"no such file: {given}")
    samples: list[LogitSample] = []
    for number, line in enumerate(read_bytes(path, BYTES).split(b"\n")[:-1], 1):
        try:
            sample = LogitSample.from_line(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        while samples and samples[-1].step >= sample.step:
            samples.pop()
        samples.append(sample)
    return samples


def nan_as_inf(value: float) -> float:
    """The number, or infinity for NaN: for comparisons in which NaN is the largest."""
    return math.inf if math.isnan(value) else value
