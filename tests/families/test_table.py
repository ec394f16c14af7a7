"""The table of families: as printed, its pages, the default configs of its types, and a family that a page adds."""

import re
from collections.abc import Iterator
from importlib import import_module

import pytest
from transformers import CONFIG_MAPPING

from hf_qknorm import FAMILIES, SCHEMES, patch_model, unpatch_model
from hf_qknorm.checkpoint import read_config
from hf_qknorm.families import NORMS_REFUSED, REFUSED, known_families, table
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.derived import derived_config
from qknorm_tests.tables import assert_identical, make_batch, sharp_model, step
from qknorm_tests.tiny import TINY_BY_TYPE


def test_each_family_has_a_row_and_its_style_lies_in_the_named_file():
    lines = table.text().splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(FAMILIES) == sorted(FAMILIES)
    assert len({line.index(line.split()[1], len(line.split()[0])) for line in lines[1:]}) == 1, "columns are aligned"
    for model_type, name, *_ in table.rows():
        values = vars(import_module(f"hf_qknorm.families.{name}")).values()
        assert any(value is FAMILIES[model_type].style for value in values), model_type


def test_the_page_is_up_to_date():
    page = table.PAGE.read_text(encoding="utf-8")
    assert page == table.markdown(), "run python -m hf_qknorm.families.table"
    assert all(f"| `{name}` | {why} |" in page for name, why in (REFUSED | NORMS_REFUSED).items())


def test_default_configs_of_every_type_are_read(tmp_path):
    """Without a model: many have billions of parameters, and values that tiny models replace."""
    for name in known_families():
        CONFIG_MAPPING[name]().save_pretrained(tmp_path / "base")
        base = read_config(tmp_path / "base")
        if FAMILIES[name].refusal(base, SCHEMES["none"]) is None:
            config = derived_config(name).from_pretrained(tmp_path / "base", qk_norm="none")
            config.save_pretrained(tmp_path / "patched")
            expected = config.to_dict() | {"_name_or_path": str(tmp_path / "patched")}
            assert read_config(tmp_path / "patched").to_dict() == expected, name


@pytest.fixture
def without_seed_oss(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(FAMILIES)
    monkeypatch.delitem(TINY_BY_TYPE, "seed_oss")
    del FAMILIES["seed_oss"]
    yield
    FAMILIES.clear()
    FAMILIES.update(before)  # in its order


@pytest.mark.usefixtures("without_seed_oss")
def test_the_example_adds_a_family():
    model = sharp_model("seed_oss")
    with pytest.raises(ValueError, match="model_type 'seed_oss' is not supported"):
        patch_model(model, "qk_norm")

    page = table.PAGE.with_name("README.md")
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, str(page), "exec"), {"__name__": "example"})
    original, patched = sharp_model("seed_oss"), patch_model(sharp_model("seed_oss"), "none")
    assert len(patched_layers(patched)) == original.config.num_hidden_layers
    for kind in ("plain", "left"):
        assert_identical(step(patched, make_batch(kind)), step(original, make_batch(kind)))
    normed = step(patch_model(unpatch_model(patched), "qk_norm_cap"), make_batch("left"))
    assert all(normed[name].abs().max() > 0 for name in normed if name.endswith(("q_norm.weight", "k_norm.weight")))
