"""The samples of `LogitMonitor`, and the JSONL files that hold them, a line for each sampled step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from hf_qknorm.files.paths import check_writable, user_path
from hf_qknorm.reports.records import FORMAT, STRICT, Count, LayerStatistics, Name, read_json
from hf_qknorm.reports.tables import mean

DIGITS = 5  # significant digits of the numbers in the file
BYTES = 2**30  # of a log: a sample of 100 layers with 128 heads has 0.9 MB


@dataclass(frozen=True)
class LogitSample:
    """All layers at a step, by name. `step` is the number under which the Trainer logs the loss."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    step: Count
    layers: Annotated[dict[Name, LayerStatistics], Field(min_length=1, max_length=10_000)]
    format: Literal[1] = field(default=FORMAT, repr=False, kw_only=True)

    def worst(self) -> tuple[str, int, float]:
        """The layer, the head and the value of the largest |logit|; NaN counts as the largest."""
        return max(self._heads("max_logit"), key=lambda found: nan_as_inf(found[2]))

    def sharpest(self) -> tuple[str, int, float]:
        """The layer, the head and the value of the least entropy; NaN counts as the least."""
        return max(self._heads("entropy"), key=lambda found: nan_as_inf(-found[2]))

    def _heads(self, field: str) -> Iterator[tuple[str, int, float]]:
        for name, layer in self.layers.items():
            yield from ((name, head, value) for head, value in enumerate(getattr(layer, field)))

    def __str__(self) -> str:
        (name, head, largest), (sharp_name, sharp_head, least) = self.worst(), self.sharpest()
        bound = self.summary().get("attention/max_bound")
        bounded = "" if bound is None else f", largest bound {bound:.4g}"
        return (
            f"step {self.step}: largest |logit| {largest:.4g} ({name}, head {head}), "
            f"least entropy {least:.3g} nats ({sharp_name}, head {sharp_head}){bounded}"
        )

    def summary(self) -> dict[str, float]:
        """The largest |logit| and the least entropy of any head, and the largest bound of any layer that has one."""
        bounds = [layer.bound for layer in self.layers.values() if layer.bound is not None]
        found = {"attention/max_logit": self.worst()[2], "attention/min_entropy": self.sharpest()[2]}
        return found | ({"attention/max_bound": max(bounds, key=nan_as_inf)} if bounds else {})

    def scalars(self) -> dict[str, float]:
        """All numbers for a logger: the summary, where the largest |logit| is and each layer's, the mean of `over_cap`.

        With norms, the largest |gain| of any.
        """
        name, head, _ = self.worst()
        layers = list(self.layers.values())
        gains = [gain for x in layers for gain in (x.gain_q, x.gain_k) if gain is not None]
        return self.summary() | {
            "attention/max_logit_layer": list(self.layers).index(name),
            "attention/max_logit_head": head,
            "attention/over_cap": mean([share for layer in layers for share in layer.over_cap]),
            **{f"attention/max_logit/{i}": max(x.max_logit, key=nan_as_inf) for i, x in enumerate(layers)},
            **({"attention/max_gain": max(gains, key=nan_as_inf)} if gains else {}),
        }

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

    Where a resumed run took a step again, its sample counts. A last line without an end, from a killed run, is ignored.

    Raises FileNotFoundError, and ValueError, naming file and line, for a file that is too large or not from
    `LogitMonitor`.
    """
    given, path = path, user_path(path, "the log")
    if not path.exists():
        raise FileNotFoundError(f"no such file: {given}")
    if path.stat().st_size > BYTES:
        raise ValueError(f"{path} is larger than {BYTES:,} bytes, the limit")
    samples: list[LogitSample] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                sample = LogitSample.from_line(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            while samples and samples[-1].step >= sample.step:
                samples.pop()
            samples.append(sample)
    return samples


def log_file(path: Path, *, resumed: bool) -> Path:
    """The file for a run's samples, which is made if need be: log.jsonl, or log-2.jsonl and so on where that has some.

    A resumed run takes the last of them, without a line that has no end. Raises OSError for a path that can't be one.
    """
    check_writable(path)
    places = [path]
    while places[-1].exists() and places[-1].stat().st_size:
        places.append(path.with_stem(f"{path.stem}-{len(places) + 1}"))
    place = places[-2] if resumed and len(places) > 1 else places[-1]
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
    return place


def append(path: Path, sample: LogitSample) -> None:
    """Add a sample's line in one write: a killed run damages the last line at most."""
    with path.open("ab", buffering=0) as file:
        file.write(sample.line().encode())


def nan_as_inf(value: float) -> float:
    """The number, or infinity for NaN: for comparisons in which NaN is the largest."""
    return math.inf if math.isnan(value) else value
