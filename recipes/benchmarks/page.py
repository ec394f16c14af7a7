"""The pages of the benchmarks: machine, versions and commit, tables in Markdown, and where they are written."""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parents[2]


def commit() -> str:
    """The commit, marked dirty where the package differs from it."""

    def git(*command: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *command], check=True, capture_output=True, text=True).stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + ("-dirty" if git("status", "-s", "hf_qknorm") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def provenance() -> str:
    """The machine, the versions, the commit and the date of a measurement, in one line."""
    vectors, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"model name\s*: (.+)", info)
    cpu = f"{name[1] if name else platform.processor()}, {vectors}, {threads} thread(s)"
    made = {
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    return "; ".join(f"{name} {value}" for name, value in made.items()) + "."


def table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> list[str]:
    """Format a table, with an empty line after it.

    `align` has a letter for each column: l for text, r for numbers; the default is text in the first column alone.
    """
    delimiters = [{"l": "---", "r": "---:"}[letter] for letter in align or "l" + "r" * (len(head) - 1)]
    top, *body = ("| " + " | ".join(cells) + " |" for cells in (head, *rows))
    return [top, f"|{'|'.join(delimiters)}|", *body, ""]


def publish(title: str, doc: str | None, measured: str, lines: Iterable[str], output: Path | None) -> str:
    """Print a page, write it as `output`.md where one is given, and return it.

    Before the lines it has the command and the description of a recipe's docstring, and what was measured, and where.
    """
    command, _, about = (doc or "").partition("\n\n")[2].partition("\n\n")
    top = [f"# {title}", f"```\n{command.strip()}\n```", about.strip(), measured]
    page = "\n\n".join([*top, "\n".join(lines).rstrip()]) + "\n"
    print(page, end="")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.with_suffix(".md").write_text(page, encoding="utf-8")
    return page
