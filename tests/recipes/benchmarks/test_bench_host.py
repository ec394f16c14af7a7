"""The host's time of a call of the Triton attention, whose kernels are compiled for a GPU that is not there."""

import pytest

pytest.importorskip("triton", reason="needs Triton, which compiles the kernels")


@pytest.mark.slow
def test_the_page_has_every_way_to_call(run_recipe, tmp_path) -> None:
    page = run_recipe("bench_host.py", "--turns", 2, "--out", tmp_path / "host")
    assert (tmp_path / "host.md").read_text() == page
    names = [line.split(" | ")[0].strip("| ") for line in page.splitlines() if line.endswith("|")][2:]
    ways = ("inference", "forward", "forward and backward")
    assert names == ["a million additions", *(f"{way}, head_dim {d}" for d in (64, 128) for way in ways)]
