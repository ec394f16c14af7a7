"""A log of finished runs, from which an interrupted sweep continues."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from page import made
from transformers import HfArgumentParser

Row = dict[str, Any]


class Runs:
    """Finished runs, one line of JSON each: settings, result, and provenance."""

    def __init__(self, path: Path) -> None:
        self.path, self.made, self.used = path, made(), []
        self.rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def get(self, settings: Row, run: Callable[[], Row]) -> Row:
        """Return the result of the run with these settings: an earlier one, or that of `run`, which is stored."""
        found = next((row for row in self.rows if row["settings"] == settings), None)
        if found is None:
            found = {"settings": settings, "result": run(), "made": self.made}
            self.rows.append(found)
            with self.path.open("a") as file:
                file.write(json.dumps(found) + "\n")
        self.used.append(found)
        return found["result"]


def provenance(rows: list[Row]) -> str:
    """Format every value of the provenance among the rows, in one line."""
    named = {name: list(dict.fromkeys(row["made"][name] for row in rows)) for name in rows[0]["made"]}
    return "; ".join(f"{name} {', '.join(values)}" for name, values in named.items()) + "."


def parse(options: Any, command: list[str] | None) -> tuple[Any, Runs]:
    """The options from the command line, and the log of their runs. The process computes with one thread."""
    (found,) = HfArgumentParser(options).parse_args_into_dataclasses(command)
    logging.getLogger("hf_qknorm").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    return found, Runs(found.out.with_suffix(".jsonl"))
