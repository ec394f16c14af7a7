"""The example on the page of families adds a family that was missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_qknorm import FAMILIES, families, patch_model, unpatch_model
from hf_qknorm.model.attention import patched_layers
from qknorm_tests.tables import assert_identical, make_batch, sharp_model, step
from qknorm_tests.tiny import TINY_BY_TYPE

PAGE = Path(families.__file__).with_name("README.md")


@pytest.fixture
def without_seed_oss() -> Iterator[None]:
    tables = [(table, dict(table)) for table in (FAMILIES, TINY_BY_TYPE)]
    for table, _ in tables:
        del table["seed_oss"]
    yield
    for table, before in tables:  # in its order
        table.clear()
        table.update(before)


@pytest.mark.usefixtures("without_seed_oss")
def test_the_example_adds_a_family():
    model = sharp_model("seed_oss")
    with pytest.raises(ValueError, match="model_type 'seed_oss' is not supported"):
        patch_model(model, "qk_norm")

    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {"__name__": "example"})
    original, patched = sharp_model("seed_oss"), patch_model(sharp_model("seed_oss"), "none")
    assert len(patched_layers(patched)) == original.config.num_hidden_layers
    for kind in ("plain", "left"):
        assert_identical(step(patched, make_batch(kind)), step(original, make_batch(kind)))
    normed = step(patch_model(unpatch_model(patched), "qk_norm_cap"), make_batch("left"))
    assert all(normed[name].abs().max() > 0 for name in normed if name.endswith(("q_norm.weight", "k_norm.weight")))
