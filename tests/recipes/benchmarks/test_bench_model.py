"""A model's training step, with tiny models where no GPU is."""

from importlib import import_module

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which comes with torch on CUDA and with the test extra")
bench_model = import_module("bench_model")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="takes a minute on a GPU")
def test_the_page_has_every_way_to_train(tmp_path) -> None:
    assert bench_model.main(["--output", str(tmp_path / "step.md")]) == 0
    lines = [line for line in (tmp_path / "step.md").read_text().splitlines() if line.endswith("|")][2:]
    assert [line.split(" | ")[0].strip("| ") for line in lines] == [*bench_model.STEPS]
    assert lines[0].endswith("| 1.00 |")
