"""Rows of the attention benchmark, and their output: a CSV and a page."""

from __future__ import annotations

import csv
import re
import subprocess
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from bench_cases import Case
from machine import cpu_name, made

PASSES = ("forward", "backward", "both")
INTERPRETED = "Triton's interpreter on a CPU: its numbers mean nothing"


@dataclass
class Row:
    """One measurement, or the reason why there is none."""

    case: str
    what: str
    kind: str  # forward, backward or both
    shape: Case | None = None
    ms_min: float | None = None
    ms_median: float | None = None
    ms_max: float | None = None
    host_ms: float | None = None
    rate: float | None = None
    unit: str = ""
    ratio: float | None = None
    peak_mib: float | None = None
    error: float | None = None
    note: str = ""


def environment(device: torch.device, dtype: torch.dtype, given_commit: str | None) -> dict[str, str]:
    """The conditions of a number beside its shape, the same for all rows."""
    import triton

    cuda, known = device.type == "cuda", made()
    return {
        "card": torch.cuda.get_device_name(device) if cuda else f"{INTERPRETED} ({cpu_name()})",
        "driver": driver() if cuda else "none",
        "triton": triton.__version__,
        **{name: known[name] for name in ("python", "torch", "transformers", "date")},
        "commit": given_commit or known["commit"],
        "dtype": str(dtype).removeprefix("torch."),
    }


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Report:
    """All rows so far. The CSV grows with each, so that what was measured is kept whatever happens next."""

    def __init__(self, folder: Path, environment: dict[str, str], arguments: list[str]) -> None:
        self.rows: list[Row] = []
        self.environment = environment
        self.command = " ".join(["python recipes/benchmarks/bench_attention.py", *arguments])
        card = "interpreter" if environment["card"].startswith(INTERPRETED) else environment["card"]
        folder.mkdir(parents=True, exist_ok=True)
        self.stem = folder / ("attention_" + re.sub(r"[^a-z0-9]+", "-", card.lower()))
        self.columns = [f.name for f in fields(Row) if f.name != "shape"]
        self.sizes = [f.name for f in fields(Case)]
        self.csv.write_text(",".join([*self.columns, *self.sizes, *environment]) + "\n", encoding="utf-8")

    @property
    def csv(self) -> Path:
        return self.stem.with_suffix(".csv")

    @property
    def title(self) -> str:
        environment = self.environment
        names = ("driver", "torch", "triton", "transformers", "commit", "date", "dtype")
        return f"{environment['card']}: " + ", ".join(f"{name} {environment[name]}" for name in names)

    def add(self, row: Row) -> None:
        """Keep the row, and print it: what follows may take a while."""
        self.rows.append(row)
        values = {name: getattr(row, name) for name in self.columns}
        sizes = {} if row.shape is None else asdict(row.shape)
        with self.csv.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [*self.columns, *self.sizes, *self.environment], lineterminator="\n")
            writer.writerow(values | sizes | self.environment)
        print(" | ".join(cells(row)), flush=True)

    def page(self, notes: list[str]) -> str:
        """Every row, as Markdown."""
        lines = ["# Attention", "", f"`{self.command}`", "", self.title + ".", "", *(f"- {note}" for note in notes), ""]
        lines += ["| " + " | ".join(HEAD) + " |", "|---|---|---" + "|---:" * 8 + "|---|"]
        lines += ["| " + " | ".join(cells(row)) + " |" for row in self.rows]
        return "\n".join(lines) + "\n"


HEAD = ("case", "what", "pass", "ms", "min", "max", "host ms", "rate", "ratio", "MiB", "error", "note")


def number(value: float | None, form: str = ".3g") -> str:
    return "" if value is None else format(value, form)


def rounded(value: float | None) -> str:
    return "" if value is None else format(value, ".0f" if value >= 1000 else ".3g")


def cells(row: Row) -> list[str]:
    """A row as text, in the order of HEAD."""
    times = [number(value, ".4f") for value in (row.ms_median, row.ms_min, row.ms_max, row.host_ms)]
    rate = f"{rounded(row.rate)} {row.unit}" if row.rate is not None else ""
    rest = [number(row.ratio, ".2f"), number(row.peak_mib, ".0f"), number(row.error, ".1e"), row.note]
    return [row.case, row.what, row.kind, *times, rate, *rest]
