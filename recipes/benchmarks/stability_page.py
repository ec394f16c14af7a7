"""The page of the sweep of learning rates."""

from __future__ import annotations

from pathlib import Path

from run_log import Row, provenance
from stability_table import Sweep

from hf_qknorm.files.atomic_io import replace_text


def write_page(sweeps: dict[str, Sweep], rows: list[Row], about: str, settings: str, out: Path) -> str:
    """Write the page and its plots beside `out`; return the page."""
    lines = ["# The largest stable learning rate", "", *about.split("\n\n")[2:4], "", settings, "", provenance(rows)]
    for found in sweeps.values():
        lines += ["", f"Bigram {found.bigram:.4f}, trigram {found.trigram:.4f}.", ""]
        lines += [f"| arm | {' | '.join(f'{rate:g}' for rate in found.rates)} |", "|---" * (len(found.rates) + 1) + "|"]
        for arm, grid in found.grids.items():
            lines.append(f"| {arm} | " + " | ".join(f"{grid.mean(rate):.3f}" for rate in found.rates) + " |")
    text = "\n".join(lines) + "\n"
    replace_text(out.with_suffix(".md"), text)
    return text
