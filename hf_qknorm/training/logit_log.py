"""What `LogitMonitor` measured: samples, and the JSONL file that holds them, a line a sampled step."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_qknorm.files.atomic_io import replace_text, user_path
from hf_qknorm.files.untrusted import brief, check_keys, count, is_shallow, number
from hf_qknorm.stats.records import HEADS, Numbers
from hf_qknorm.stats.report import FORMAT, LAYERS, NAME
from hf_qknorm.stats.tables import mean

DIGITS = 5  # of each number in the file
LINE_BYTES = 2**24  # 100 layers of 128 heads have 0.9 MB
FILE_BYTES = 2**30
NUMBERS = 50_000_000  # in all samples together: a float takes more room in memory than on the disk


@dataclass(frozen=True)
class LayerSample:
    """A layer's attention at a step, a number a head; fields as in `LogitStatistics`, `cap` what `over_cap` means.

    `grad_q` and `grad_k` are norms of gradients: a number a head, or one for the projection, or None without any.
    """

    cap: float
    even: float
    max_logit: Numbers
    entropy: Numbers
    over_cap: Numbers
    rms_q: Numbers
    rms_k: Numbers
    rms_v: Numbers
    grad_q: Numbers | None
    grad_k: Numbers | None

    @classmethod
    def from_dict(cls, data: Any, where: str) -> LayerSample:
        """What a line holds of a layer. Raises ValueError, naming the key, for anything else."""
        check_keys(data, [field.name for field in dataclasses.fields(cls)], where)
        numbers = {
            name: None if name.startswith("grad") and value is None else _numbers(value, f"{where}.{name}")
            for name, value in data.items()
            if name not in ("cap", "even")
        }
        heads = {len(numbers[name] or ()) for name in ("max_logit", "entropy", "over_cap")}
        if len(heads) > 1:
            raise ValueError(f"{where} has max_logit, entropy and over_cap of different lengths: {sorted(heads)}")
        cap, even = (number(data[name], f"{where}.{name}") for name in ("cap", "even"))
        if not 1e-6 <= cap <= 1e6 or not 0 <= even <= 100:
            raise ValueError(
                f"{where} has cap {cap:g}, expected 1e-6 to 1e6, and even {even:g}, expected 0 to 100 nats"
            )
        return cls(cap=cap, even=even, **numbers)  # type: ignore[arg-type]


@dataclass(frozen=True)
class LogitSample:
    """All layers at a step, by name. A step has the number that the Trainer logs its loss with."""

    step: int
    layers: Mapping[str, LayerSample]

    def worst(self) -> tuple[str, int, float]:
        """The layer and head of the largest |logit|, and that; one that is no number is the worst of all."""
        return max(self._heads("max_logit"), key=lambda found: alarm(found[2]))

    def sharpest(self) -> tuple[str, int, float]:
        """The layer and head of the least entropy, and that; one that is no number is the least of all."""
        return max(self._heads("entropy"), key=lambda found: alarm(-found[2]))

    def _heads(self, name: str) -> list[tuple[str, int, float]]:
        rows = {layer: getattr(sample, name) for layer, sample in self.layers.items()}
        return [(layer, head, value) for layer, row in rows.items() for head, value in enumerate(row)]

    def scalars(self) -> dict[str, float]:
        """What a logger gets: the worst head, the sharpest, the mean share over the cap, and each layer's maximum."""
        (layer, head, largest), (_, _, least) = self.worst(), self.sharpest()
        shares = [share for sample in self.layers.values() for share in sample.over_cap]
        by_layer = {f"attention/max_logit/{i}": max(s.max_logit, key=alarm) for i, s in enumerate(self.layers.values())}
        return {
            "attention/max_logit": largest,
            "attention/max_logit_layer": list(self.layers).index(layer),
            "attention/max_logit_head": head,
            "attention/min_entropy": least,
            "attention/over_cap": mean(shares),
            **by_layer,
        }

    def line(self) -> str:
        """The sample as a line of JSON; numbers have five digits."""
        layers = {name: _rounded(dataclasses.asdict(layer)) for name, layer in self.layers.items()}
        return json.dumps({"format": FORMAT, "step": self.step, "layers": layers}, separators=(",", ":")) + "\n"

    @classmethod
    def from_dict(cls, data: Any) -> LogitSample:
        """What a line holds. Raises ValueError, naming the key, for anything else."""
        check_keys(data, ("format", "step", "layers"), "sample")
        if data["format"] != FORMAT:
            raise ValueError(f"sample.format is {brief(data['format'])}, expected {FORMAT}: another hf_qknorm wrote it")
        layers = data["layers"]
        if not isinstance(layers, Mapping) or not 0 < len(layers) <= LAYERS or not all(map(NAME.fullmatch, layers)):
            raise ValueError(
                f"sample.layers is {brief(layers)}, expected a mapping from layers' names, {LAYERS:,} at most"
            )
        found = {name: LayerSample.from_dict(layer, f"sample.layers.{name}") for name, layer in layers.items()}
        return cls(count(data["step"], "sample.step"), found)


def read_log(path: str | Path) -> list[LogitSample]:
    """The samples in a JSONL file, by step. A last line without an end, which a killed run left, is passed over.

    Raises FileNotFoundError, and ValueError, naming file and line, for what `LogitMonitor` did not write, or a file
    that is too large.
    """
    given, path = path, user_path(path, "the log")
    if not path.exists():
        raise FileNotFoundError(f"no such file: {given}")
    samples: list[LogitSample] = []
    heads: dict[str, int] = {}
    for where, line in _lines(path):
        try:
            sample = LogitSample.from_dict(_parsed(line))
            if samples and sample.step <= samples[-1].step:
                raise ValueError(f"sample.step is {sample.step}, expected more than {samples[-1].step}, the one before")
            for name, layer in sample.layers.items():
                if heads.setdefault(name, len(layer.max_logit)) != len(layer.max_logit):
                    raise ValueError(f"sample.layers.{name} has {len(layer.max_logit)} heads, and {heads[name]} before")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        samples.append(sample)
        if len(samples) * sum(heads.values()) * 8 > NUMBERS:
            raise ValueError(f"{where}: {path} holds more than {NUMBERS:,} numbers, the most that is read")
    return samples


def continue_log(path: Path, step: int, *, resumed: bool) -> None:
    """Make a log ready for what comes after `step`: what a run before wrote beyond it, or did not end, is taken out.

    Raises FileExistsError if that is all there is and the run is not known to be `resumed`, and as `read_log` does.
    """
    samples = read_log(path) if path.exists() else []
    kept = [sample for sample in samples if sample.step <= step]
    if samples and not kept and not resumed:
        raise FileExistsError(
            f"{path} holds samples of another run, from step {samples[0].step} on: give another path, or move it away"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, "".join(s.line() for s in kept))


def append(path: Path, sample: LogitSample) -> None:
    """Add a sample's line; one write, so that a killed run tears the last line at most."""
    with path.open("ab", buffering=0) as file:
        file.write(sample.line().encode())


def alarm(value: float) -> float:
    """How far up a number stands among others: what is none stands above all."""
    return math.inf if math.isnan(value) else value


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The whole lines of a file with where they stand: "file, line 3"."""
    with path.open("rb") as file:
        for i in range(1, FILE_BYTES):
            line, where = file.readline(LINE_BYTES + 1), f"{path}, line {i}"
            if len(line) > LINE_BYTES or file.tell() > FILE_BYTES:
                raise ValueError(
                    f"{where}: larger than what is read, {LINE_BYTES:,} bytes a line and {FILE_BYTES:,} in all"
                )
            if not line.endswith(b"\n"):
                return
            yield where, line


def _parsed(line: bytes) -> Any:
    try:
        data = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"no JSON ({error})") from None
    if not is_shallow(data):
        raise ValueError("nested too deeply")
    return data


def _numbers(value: Any, where: str) -> Numbers:
    if not isinstance(value, list) or not 0 < len(value) <= HEADS:
        raise ValueError(f"{where} is {brief(value)}, expected a list of numbers, one a head")
    return tuple(number(item, f"{where}[{i}]") for i, item in enumerate(value))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Sequence):
        return [_rounded(item) for item in value]
    return {key: _rounded(item) for key, item in value.items()} if isinstance(value, dict) else value
