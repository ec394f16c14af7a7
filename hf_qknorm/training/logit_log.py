"""The samples of `LogitMonitor`, and the JSONL file that holds them, one line per sampled step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from hf_qknorm.files.atomic_io import replace_text
from hf_qknorm.files.paths import user_path
from hf_qknorm.reports.records import FORMAT, STRICT, Count, LayerStatistics, Name, read_json
from hf_qknorm.reports.tables import mean

DIGITS = 5  # significant digits of the numbers in the file
LINE_BYTES = 2**24  # 100 layers of 128 heads have 0.9 MB
FILE_BYTES = 2**30
NUMBERS = 50_000_000  # in all samples: a float takes more bytes in memory than in the file


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

    def __str__(self) -> str:
        (name, head, largest), (sharp_name, sharp_head, least) = self.worst(), self.sharpest()
        bounds = [layer.bound for layer in self.layers.values() if layer.bound is not None]
        bound = f", largest bound {max(bounds, key=nan_as_inf):.4g}" if bounds else ""
        return (
            f"step {self.step}: largest |logit| {largest:.4g} ({name}, head {head}), "
            f"least entropy {least:.3g} nats ({sharp_name}, head {sharp_head}){bound}"
        )

    def _heads(self, field: str) -> Iterator[tuple[str, int, float]]:
        for name, layer in self.layers.items():
            yield from ((name, head, value) for head, value in enumerate(getattr(layer, field)))

    def scalars(self) -> dict[str, float]:
        """The numbers for a logger: the worst head, the least entropy, the mean of `over_cap`, each layer's maximum.

        Of the layers' outputs, the largest rms: of queries, keys and values, of attention, and of the MLP. With norms
        also the largest |gain| of any, and the largest bound.
        """
        (name, head, largest), (_, _, least) = self.worst(), self.sharpest()
        layers = list(self.layers.values())
        return {
            "attention/max_logit": largest,
            "attention/max_logit_layer": list(self.layers).index(name),
            "attention/max_logit_head": head,
            "attention/min_entropy": least,
            "attention/over_cap": mean([share for layer in layers for share in layer.over_cap]),
            **{f"attention/max_logit/{i}": max(x.max_logit, key=nan_as_inf) for i, x in enumerate(layers)},
            **{f"attention/{name}": max(known, key=nan_as_inf) for name, known in self._by_layer() if known},
        }

    def _by_layer(self) -> Iterator[tuple[str, list[float]]]:
        layers = self.layers.values()
        yield "max_rms_qkv", [x.rms_qkv for x in layers]
        yield "max_rms_out", [x.rms_out for x in layers if x.rms_out is not None]
        yield "max_rms_mlp", [x.rms_mlp for x in layers if x.rms_mlp is not None]
        yield "max_gain", [gain for x in layers for gain in (x.gain_q, x.gain_k) if gain is not None]
        yield "max_bound", [x.bound for x in layers if x.bound is not None]

    def line(self) -> str:
        """The sample as a line of JSON, with five significant digits."""
        text = json.dumps({"format": self.format, **SAMPLE.dump_python(self, mode="json", exclude_defaults=True)})
        rounded = json.loads(text, parse_float=lambda digits: float(f"{float(digits):.{DIGITS}g}"))
        return json.dumps(rounded, separators=(",", ":")) + "\n"

    @classmethod
    def from_line(cls, line: bytes) -> LogitSample:
        """The inverse of `line`. Raises ValueError, naming the key, for anything else."""
        sample = read_json(SAMPLE, line, "sample")
        for name, layer in sample.layers.items():
            _check_layer(layer, f"sample.layers.{name}")
        return sample


SAMPLE = TypeAdapter(LogitSample)


def read_log(path: str | Path) -> list[LogitSample]:
    """Read the samples of a JSONL file, by step. A last line without an end, from a killed run, is ignored.

    Raises FileNotFoundError, and ValueError, naming file and line, for a file that is too large or not from
    `LogitMonitor`.
    """
    given, path = path, user_path(path, "the log")
    if not path.exists():
        raise FileNotFoundError(f"no such file: {given}")
    samples: list[LogitSample] = []
    heads: dict[str, int] = {}
    for where, line in _lines(path):
        try:
            sample = LogitSample.from_line(line)
            if samples and sample.step <= samples[-1].step:
                raise ValueError(f"sample.step is {sample.step}, expected more than {samples[-1].step}, the one before")
            for name, layer in sample.layers.items():
                if heads.setdefault(name, len(layer.max_logit)) != len(layer.max_logit):
                    raise ValueError(f"sample.layers.{name} has {len(layer.max_logit)} heads, and {heads[name]} before")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        samples.append(sample)
        if len(samples) * sum(heads.values()) * 8 > NUMBERS:
            raise ValueError(f"{where}: {path} holds more than {NUMBERS:,} numbers, the limit")
    return samples


def continue_log(path: Path, step: int, *, resumed: bool) -> None:
    """Prepare a log for the samples after `step`: remove later samples and a line without an end, from a run before.

    Raises FileExistsError if no sample is left and the run is not `resumed`, and all errors of `read_log`.
    """
    samples = read_log(path) if path.exists() else []
    kept = [sample for sample in samples if sample.step <= step]
    if samples and not kept and not resumed:
        raise FileExistsError(
            f"{path} holds samples of another run, from step {samples[0].step} on: give another path, or move it away"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, "".join(sample.line() for sample in kept))


def append(path: Path, sample: LogitSample) -> None:
    """Add a sample's line in one write: a killed run damages the last line at most."""
    with path.open("ab", buffering=0) as file:
        file.write(sample.line().encode())


def nan_as_inf(value: float) -> float:
    """The number, or infinity for NaN: for comparisons in which NaN is the largest."""
    return math.inf if math.isnan(value) else value


def _check_layer(layer: LayerStatistics, where: str) -> None:
    """Raise ValueError for numbers that can't be drawn."""
    if not 1e-6 <= layer.cap <= 1e6 or not 0 <= layer.even <= 100:
        raise ValueError(
            f"{where} has cap {layer.cap:g}, expected 1e-6 to 1e6, and even {layer.even:g}, expected 0 to 100 nats"
        )
    lengths = {len(values) for values in (layer.max_logit, layer.entropy, layer.over_cap)}
    if len(lengths) > 1:
        raise ValueError(f"{where} has max_logit, entropy and over_cap of different lengths: {sorted(lengths)}")


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the complete lines of a file with their place: "file, line 3"."""
    with path.open("rb") as file:
        for i in range(1, FILE_BYTES):
            line, where = file.readline(LINE_BYTES + 1), f"{path}, line {i}"
            if len(line) > LINE_BYTES or file.tell() > FILE_BYTES:
                raise ValueError(
                    f"{where}: larger than the limits, {LINE_BYTES:,} bytes a line and {FILE_BYTES:,} in all"
                )
            if not line.endswith(b"\n"):
                return
            yield where, line
