"""Generation beside the unpatched model, at the smallest size."""

from __future__ import annotations

import bench_generation
import pytest
import torch


@pytest.fixture(autouse=True)
def threads():
    """The benchmark sets the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_page_has_every_variant(tmp_path):
    path = tmp_path / "generation.md"
    times = bench_generation.main(["--size", "quick", "--turns", "3", "--threads", "1", "--output", str(path)])
    page = path.read_text()
    assert len(times) == 3
    for work, spent in times.items():
        assert list(spent) == list(bench_generation.VARIANTS)
        assert all(len(turns) == 3 for turns in spent.values())
        assert f"| {work} | unpatched |" in page
    assert page.count("| 1.00 (1.00 to 1.00) |") == 3


def test_all_variants_have_the_same_weights():
    made = bench_generation.models(bench_generation.SIZES["quick"])
    first = made[bench_generation.UNPATCHED].model.layers[0].self_attn.q_proj.weight
    assert {model.model.layers[0].self_attn.q_proj.weight.data_ptr() for model in made.values()} == {first.data_ptr()}
    assert made["qk_norm_cap"].model.layers[0].self_attn.softcap == 50.0
