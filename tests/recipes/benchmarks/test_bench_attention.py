"""The attention benchmark in its small mode, and its behaviour on faults."""

import csv

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which interprets the kernels")

import bench_attention as bench

from hf_qknorm.ops import library
from qknorm_tests import interpreter

interpreter.install()
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only where no GPU is")


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Run the benchmark in this process on one small case; return the exit status, the rows and the page."""

    def run(*implementations):
        monkeypatch.setattr(bench, "COMPARED", implementations)
        monkeypatch.setattr(bench, "PASSES", {"forward": 1.0})
        status = bench.main(["--cpu", "--out", str(tmp_path / "found")])
        return status, rows(tmp_path / "found.csv"), (tmp_path / "found.md").read_text()

    return run


def rows(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_the_small_mode_runs_completely(run_recipe, tmp_path):
    run_recipe("bench_attention.py", "--cpu", "--out", tmp_path / "found")
    found = rows(tmp_path / "found.csv")
    for named in bench.COMPARED:
        mine = [row for row in found if row["what"] == named.name]
        assert [row["pass"] for row in mine] in ([*bench.PASSES], [""])
        for row in mine:
            assert row["made"]
            assert bool(row["note"]) != bool(row["ms"]), row
            assert not (named.ours and row["note"])
    assert (tmp_path / "found.md").read_text().count("\n| ") == len(found) + 1


def test_a_failed_check_of_ours_is_no_row_and_an_exit_status(measured, monkeypatch):
    right = library.fused_attention
    monkeypatch.setattr(library, "fused_attention", lambda *tensors, **options: 1.1 * right(*tensors, **options))
    status, found, page = measured(bench.FLASH, bench.OURS)
    assert status == 1
    assert found == []
    assert f"- failed: {bench.TINY[0]}, {bench.OURS.name}: over the error budget" in page
