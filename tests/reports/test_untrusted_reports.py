"""A report of a downloaded checkpoint is saved again with the model, or is left out: the user's checkpoint is whole."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hf_qknorm import Calibration, patch_model
from hf_qknorm.convert.card import render_card
from hf_qknorm.files.names import REPORT as FILE
from hf_qknorm.model.record import drop_record, load_record, record_of, write_record
from qknorm_tests.hostile import REPORT, as_json, changed, variants
from qknorm_tests.slow import slow_but
from qknorm_tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model() -> Any:
    return patch_model(tiny_model("llama", num_hidden_layers=1), REPORT.scheme)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return REPORT.to_dict()


def passed_on(model: Any, data: bytes, folder: Path) -> bool:
    """Whether the model takes up a report of this text. The report that it then saves is JSON, and has a card."""
    for name in ("in", "out"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "in" / FILE).write_bytes(data)
    drop_record(model)
    load_record(model, folder / "in", {})
    if record_of(model) is None:
        return False
    model.config.save_pretrained(folder / "out")
    write_record(model, folder / "out")
    json.loads((folder / "out" / FILE).read_text(), parse_constant=pytest.fail)
    saved = Calibration.load(folder / "out" / FILE)
    card = render_card(folder / "out")
    assert saved.scheme == Calibration.load(folder / "in" / FILE).scheme
    assert not any(part in card for part in ("<b>", "\u202e", "javascript", "unknown"))
    return True


@pytest.mark.parametrize("step", slow_but([9], [1, 9]))
def test_each_part_of_a_report(step, model, report, tmp_path, caplog):
    """Of a few thousand changes, those that are no report are left out, each with a warning that names the file."""
    assert passed_on(model, as_json(report).encode(), tmp_path)
    left_out, changes = 0, [*variants(report)][::step]
    for data in changes:
        caplog.clear()
        if not passed_on(model, as_json(data).encode(), tmp_path):
            left_out += 1
            (line,) = (x.getMessage() for x in caplog.records if x.name == "hf_qknorm")
            assert line.startswith(f"the calibration report is left out: {tmp_path / 'in' / FILE}")
            assert len(line) < 2000
    assert len(changes) / 2 < left_out < len(changes)


NAMED = {
    "ones/loss": math.inf,
    "chosen/kl": math.nan,
    "layers/layers.0/after/entropy": [1.0, math.nan],
    "layers/layers.0/after/bound": -math.inf,
    "layers/layers.0/speed": 1,
    "layers": dict.fromkeys(map(str, range(10_001)), {}),
}


@pytest.mark.parametrize("path", NAMED)
def test_the_warning_names_the_field(path, model, report, tmp_path, caplog):
    assert not passed_on(model, as_json(changed(report, path, NAMED[path])).encode(), tmp_path)
    assert path.replace("/", ".") in caplog.text


@pytest.mark.parametrize(
    "text", [b"\xff\xfe", b"[" * 10**5, b'{"a":' * 150 + b"1" + b"}" * 150, b'{"tokens": ' + b"9" * 5000 + b"}", b""]
)
def test_files_that_are_no_report(text, model, tmp_path, caplog):
    assert not passed_on(model, text, tmp_path)
    assert str(tmp_path / "in" / FILE) in caplog.text
