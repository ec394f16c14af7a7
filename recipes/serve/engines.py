"""What the comparisons share: an engine's own virtual environment, the predictions of transformers, and the pages."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from page import ROOT, provenance, publish, table

__all__ = ["ROOT", "environment", "predictions", "table", "write_page"]
MADE = provenance()  # of the commit that a run starts with


def environment(folder: Path, *packages: str, without: tuple[str, ...] = ()) -> Path:
    """The python of a virtual environment with these packages, which is made if there is none.

    `without` are packages to remove again.

    Raises RuntimeError if pip fails, or takes longer than five minutes.
    """
    python = folder.absolute() / "bin/python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        try:
            subprocess.run([*pip, "install", *packages], check=True, timeout=300)
            if without:
                subprocess.run([*pip, "uninstall", "--yes", *without], check=True)
        except subprocess.SubprocessError as error:
            python.unlink()
            raise RuntimeError(f"{' '.join(packages)} can't be installed: {error}") from error
    return python


@torch.no_grad()
def predictions(model: Any, prompts: list[list[int]], count: int) -> tuple[list[list[float]], list[list[int]]]:
    """Transformers' log-probabilities of each prompt's tokens but the first, and `count` greedy tokens behind it."""
    logprobs, texts = [], []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        scores = model(tokens).logits[0, :-1].float().log_softmax(-1)
        logprobs.append(scores.gather(1, tokens[0, 1:, None])[:, 0].tolist())
        new = model.generate(tokens, max_new_tokens=count, do_sample=False)
        texts.append(new[0, len(prompt) :].tolist())
    return logprobs, texts


def write_page(title: str, doc: str | None, versions: dict[str, str], lines: list[str], out: Path) -> None:
    """Write a page: the recipe's description, versions and commit, and these lines."""
    engine = ", ".join(f"{name} {value}" for name, value in versions.items())
    publish(title, doc, f"Engine: {engine}. Compared with: {MADE}", lines, out)
