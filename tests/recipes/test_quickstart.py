"""The notebook runs in a new kernel, and its stored outputs are small and clean.

`TQDM_DISABLE=1 jupyter execute --inplace recipes/quickstart.ipynb` stores them anew.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytestmark = pytest.mark.integration

NOTEBOOK = Path(__file__).parents[2] / "recipes" / "quickstart.ipynb"
LARGEST = 100_000  # bytes
WIDGET = "application/vnd.jupyter.widget-view+json"  # a progress bar, where ipywidgets is installed
LOADED = r"QKNormLlamaForCausalLM, q=rms, k=rms, softcap=50.0; the logits differ by 0$"


def kinds(notebook: Any) -> list[list[str]]:
    """The outputs of each code cell, each in its richest form, without stderr and progress bars."""
    return [
        [
            next(kind for kind in ("image/png", "text/html", "text/plain") if kind in output["data"])
            if "data" in output
            else output["output_type"]
            for output in cell["outputs"]
            if output.get("name") != "stderr" and WIDGET not in output.get("data", {})
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def streams(notebook: Any, name: str) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output["text"] for output in outputs if output.get("name") == name)


def test_stored_outputs_are_small_and_clean():
    assert NOTEBOOK.stat().st_size <= LARGEST
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert {kind for cell in kinds(notebook) for kind in cell} == {"text/html", "image/png", "stream"}
    assert streams(notebook, "stderr") == ""
    text = re.sub(r'"image/png": "[^"]*"', "", NOTEBOOK.read_text(encoding="utf-8"))
    assert not re.search(r"Warning|[A-Z]:\\|/(tmp|home|root|Users|var|usr)/", text)
    shown = streams(notebook, "stdout")
    assert re.search(LOADED, shown, re.MULTILINE)
    assert "\nAdvice, if logits grow in training: qk_norm_cap\n" in shown
    assert "fresh gains" in shown


def test_links_lead_to_files():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    source = "".join(cell.source for cell in cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)#]+)", source)
    assert len(links) >= 3
    assert all((NOTEBOOK.parent / link).is_file() for link in links)


@pytest.mark.slow
def test_the_notebook_runs_in_a_new_kernel(tmp_path):
    stored = nbformat.read(NOTEBOOK, as_version=4)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TMPDIR": str(tmp_path)}
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment)
    assert kinds(notebook) == kinds(stored)
    assert "Warning" not in streams(notebook, "stderr")
    shown = streams(notebook, "stdout")
    for phrase in (
        LOADED,
        "^LlamaForCausalLM: llama, 2 layers of 4 heads",
        "^Advice, if logits grow in training: ",
        "^fresh gains ",
    ):
        assert re.search(phrase, shown, re.MULTILINE), phrase
    (folder,) = tmp_path.glob("qknorm-*")
    assert {path.name for path in folder.iterdir()} >= {"patched", "inspect.png", "logits.jsonl", "logits.png"}
