"""Rows of the attention benchmark, and their output: a CSV, a page, a plot, and a printed table."""

from __future__ import annotations

import csv
import datetime
import platform
import re
import subprocess
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from bench_cases import Case
from bench_tiled import commit, cpu_name

from hf_qknorm.files.atomic_io import replace_file

PASSES = ("forward", "backward", "both")
INTERPRETED = "Triton's interpreter on a CPU: its numbers mean nothing"


@dataclass
class Row:
    """One measurement, or the reason why there is none."""

    case: str
    what: str
    kind: str  # forward, backward or both; step
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

    cuda = device.type == "cuda"
    return {
        "card": torch.cuda.get_device_name(device) if cuda else f"{INTERPRETED} ({cpu_name()})",
        "driver": driver() if cuda else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "commit": given_commit or commit(),
        "date": datetime.date.today().isoformat(),
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
        sizes = {} if row.shape is None else asdict(row.shape) | {"lengths": " ".join(map(str, row.shape.lengths))}
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

    def table(self) -> str:
        """A line for each case and implementation, its passes side by side: short enough for a terminal."""
        lines = [self.title, f"{'':50} {'forward':^24}{'backward':^24}{'both':^24}"]
        lines[1] += "  MiB  error"
        last = ""
        for (case, what), rows in self._together().items():
            if case != last:
                lines.append(f"{case}")
                last = case
            lines.append(line(what, rows))
        return "\n".join(lines)

    def _together(self) -> dict[tuple[str, str], dict[str, Row]]:
        found: dict[tuple[str, str], dict[str, Row]] = {}
        for row in sorted(self.rows, key=lambda row: [r.case for r in self.rows].index(row.case)):
            found.setdefault((row.case, row.what), {})[row.kind] = row
        return found

    def plot(self) -> Path:
        """TFLOP/s over length: a column a shape, a row a pass, a line a implementation, of those with lines to draw."""
        from matplotlib.figure import Figure

        rates: dict[str, dict[tuple[str, tuple[int, int, int]], dict[int, float]]] = {}
        for row in self.rows:
            if row.shape and row.rate and row.unit == "TFLOP/s" and not (row.shape.window or row.shape.lengths):
                shape = (row.shape.heads, row.shape.heads_kv, row.shape.head_dim)
                rates.setdefault(row.what, {}).setdefault((row.kind, shape), {})[row.shape.length] = row.rate
        longest = {name: max(map(len, lines.values())) for name, lines in rates.items()}
        names = [name for name in rates if longest[name] >= min(2, max(longest.values()))]
        shapes = list(dict.fromkeys(shape for lines in rates.values() for _, shape in lines)) or [(0, 0, 0)]
        lengths = sorted({n for name in names for line in rates[name].values() for n in line})
        figure = Figure(figsize=(3.4 * len(shapes) + 2.5, 6.2), layout="constrained")
        axes = figure.subplots(2, len(shapes), squeeze=False)
        handles: dict[str, Any] = {}
        for i, kind in enumerate(PASSES[:2]):
            axes[i][0].set_ylabel("TFLOP/s")
            for j, shape in enumerate(shapes):
                for number, name in enumerate(names):
                    points = sorted(rates[name].get((kind, shape), {}).items())
                    if points:
                        style = {"color": f"C{number % 10}", "marker": "osv^D"[number % 5], "markersize": 4}
                        (handles[name],) = axes[i][j].plot(*zip(*points, strict=True), label=name, **style)
                axes[i][j].set_xscale("log", base=2)
                axes[i][j].set_xticks(lengths, map(str, lengths))
                axes[i][j].set_ylim(bottom=0)
                axes[i][j].set_title("{}/{} heads of {}, {}".format(*shape, kind), fontsize=9)
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
        figure.suptitle(self.title, fontsize=8)
        path = self.stem.with_suffix(".png")
        replace_file(path, lambda temporary: figure.savefig(temporary, dpi=130, format="png"))
        return path


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


def line(what: str, rows: dict[str, Row]) -> str:
    """A implementation's passes side by side: ms, rate and ratio of each. Of a step, what is known."""
    text = f"  {what[:47]:48}"
    notes = list(dict.fromkeys(row.note for row in rows.values() if row.note))
    for kind in PASSES:
        row = rows.get(kind)
        if row is None or row.ms_median is None:
            text += f"{'':24}"
            continue
        text += f"{row.ms_median:9.3f} {rounded(row.rate):>7}{number(row.ratio, '.2f'):>6} "
    shown = next(reversed(rows.values()))
    text += f"{number(shown.peak_mib, '.0f'):>6}{number(shown.error, '.0e'):>7}"
    return (text + ("  " + "; ".join(notes)[:70] if notes else "")).rstrip()
