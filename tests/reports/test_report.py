"""The report of a calibration: its text, its JSON, and those of downloaded checkpoints, which are saved or left out."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from hf_qknorm import Calibration, patch_model
from hf_qknorm.convert.card import render_card
from hf_qknorm.files.names import REPORT as FILE
from hf_qknorm.model.record import drop_record, load_record, record_of, write_record
from hf_qknorm.reports.records import LayerReport, LayerStatistics, Prediction
from hf_qknorm.scheme import SCHEMES
from qknorm_tests.hostile import REPORT, as_json, changed, variants
from qknorm_tests.slow import slow_but
from qknorm_tests.tiny import tiny_model


def example(layers: int = 2) -> Calibration:
    """A report with distinct numbers."""
    before = LayerStatistics((60.0, 20.0), (0.5, 1.5), (0.1, 0.3), (0.02, 0.04))
    after = LayerStatistics((8.0, 7.0), (2.5, 2.0), (0.0, 0.0), (0.0, 0.0), gain_q=1.5)
    reports = {
        f"layers.{i}": LayerReport(before, dataclasses.replace(after, max_logit=(8.0 + i, 7.0))) for i in range(layers)
    }
    predictions = Prediction(1.415), Prediction(1.905, 0.5, 0.6), Prediction(1.531, 0.1097, 0.9)
    return Calibration(199_936, SCHEMES["soft_cap"], 50.0, *predictions, reports)


def test_the_text_and_the_properties():
    report = example()
    assert str(report) == (
        "calibrated: loss 1.415 unpatched, 1.905 with fresh gains, 1.531 with gains from 199,936 tokens; KL 0.1097"
    )
    assert (report.loss, report.kl) == (1.531, 0.1097)
    assert report.base.perplexity == pytest.approx(math.exp(1.415))
    assert Prediction(1e4).perplexity > 1e300


def with_a_knee(layers: int = 2) -> Calibration:
    """A report of a calibration with a knee."""
    report = example(layers)
    return dataclasses.replace(
        report,
        scheme=SCHEMES["qk_norm_cap"],
        knee=4.0,
        knees={0.0: Prediction(1.7, 0.2, 0.8), 4.0: Prediction(1.531, 0.004, 0.97)},
        layers={
            name: dataclasses.replace(layer, after=dataclasses.replace(layer.after, bound=150.0 + i))
            for i, (name, layer) in enumerate(report.layers.items())
        },
    )


def test_text_and_table_have_the_knee_and_its_bound():
    report = with_a_knee(layers=15)
    assert str(report).startswith("calibrated, knee 4: loss 1.415 unpatched")
    assert str(report).endswith("; KL 0.1097; |logit| ≤ 164.0 for any input, up to rounding")
    lines = [line.split() for line in report.table().splitlines()]
    assert ["calibrated,", "knee", "4", "1.531", "4.62", "0.1097", "90.0%"] in lines
    assert ["knee", "0", "1.700", "5.47", "0.2000", "80.0%"] in lines
    cells = "calm 60.0 → 22.0 0.50 → 2.00 20.00% → 0.00% 164.0 1.5, -"
    assert lines.index(["layers.14", *cells.split()]) < next(i for i, x in enumerate(lines) if x[:1] == ["layers.13"])
    assert "layers.2 " not in report.table()
    assert "… and 3 calmer layers" in report.table()
    assert "\ncalm ≤ 25, raised ≤ 50, large ≤ 100" in example(layers=15).table()
    without = [line.split() for line in example(layers=15).table().splitlines()]
    assert ["layers.14", *cells.replace("164.0", "-").split()] in without
    wide = dataclasses.replace(
        report, layers={f"model.layers.{i}.self_attn": x for i, x in enumerate(report.layers.values())}
    )
    assert max(map(len, wide.table().splitlines())) <= 120


def test_json_round_trip():
    for report in (example(), with_a_knee()):
        assert Calibration.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert with_a_knee().to_dict()["knees"]["4.0"] == {"loss": 1.531, "kl": 0.004, "agreement": 0.97}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", 2, "report: format: Input should be 1, got 2"),
        ("tokens", ..., "report: tokens: Field required$"),
        ("base_model", 3, "report: base_model: Input should be a valid string, got 3"),
        ("speed", 3, "report: speed: Unexpected keyword argument, got 3"),
        ("tokens", 1.5, "report: tokens: Input should be a valid integer, got 1.5"),
        ("tokens", -1, "report: tokens: Input should be greater than or equal to 0, got -1"),
        ("base_model", "/home/me/llama", "report: base_model: .*expected a name on the Hub"),
        ("base_model", "a/b\n---", "report: base_model: .*expected a name on the Hub"),
        ("scheme", {"qq": "rms"}, "report: scheme: .*unknown scheme field 'qq'"),
        ("cap", float("nan"), "report: cap: Input should be "),
        ("cap", 0, "report: cap: Input should be greater than 0, got 0"),
        ("base", 3.0, "report: base.*, got 3.0"),
        ("layers/layers.1/before", None, "report: layers.layers.1.before: Input should be .*, got None"),
        ("layers/a | b", {}, r"report: 'layers.a \| b"),
        ("layers/layers.0/gain_q", 1.0, "report: layers.layers.0.gain_q: Unexpected keyword argument, got 1.0"),
        ("layers/layers.1/before/entropy", [True], "layers.layers.1.before.entropy.0: Input should be a valid number"),
        ("layers", {}, "report: layers: .*at least 1 item"),
        ("knee", -3.0, "report: knee: Input should be greater than or equal to 0, got -3.0"),
        ("sharpness", float("nan"), "report: sharpness: Input should be "),
        ("knees", {"x": {"loss": 1.0}}, "report: knees.x"),
        ("knees", {"4.0": {}}, "report: knees.4.0.loss: Field required"),
        ("knees", {"-1.0": {"loss": 1.0}}, "report: knees.*greater than or equal to 0"),
        ("knees", {str(i): {"loss": 1.0} for i in range(1001)}, "report: knees: .*at most 1000 items"),
    ],
)
def test_malformed_reports_are_refused_by_field(path, value, message):
    with pytest.raises(ValueError, match=message) as error:
        Calibration.from_dict(changed(example().to_dict(), path, value))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 2000


def test_reports_with_numbers_that_are_not_finite_are_read():
    """Failed conversions have such reports."""
    diverged = dataclasses.replace(example(), ones=Prediction(math.inf), chosen=Prediction(math.nan, math.inf, 0.0))
    again = Calibration.from_dict(json.loads(json.dumps(diverged.to_dict())))
    assert math.isnan(again.loss)
    assert "nan" in again.table()


def test_a_report_is_saved_where_it_is_loaded_from(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    example().save("~/new/report.json")
    assert Calibration.load("~/new/report.json") == example()
    with pytest.raises(IsADirectoryError, match="new is a folder, and a file is to be written there"):
        example().save(tmp_path / "new")


def test_errors_name_the_file(tmp_path):
    file = tmp_path / "report.json"
    example().save(file)
    assert Calibration.load(file) == example()
    for text, message in {
        "{": "report.json: Invalid JSON",
        "[]": r"report.json: Input should be .*, got \[\]",
        '{"a":' * 150 + "1" + "}" * 150: "report.json: tokens: Field required; .*; and 5 more",
    }.items():
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            Calibration.load(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="report.json: Invalid JSON"):
        Calibration.load(file)
    with pytest.raises(ValueError, match="path is empty, which would mean the working directory"):
        Calibration.load("")


def test_a_report_of_gigabytes_is_refused(tmp_path):
    with (tmp_path / "report.json").open("wb") as file:
        file.truncate(2**32)  # a sparse file
    with pytest.raises(ValueError, match="report.json is larger than 67,108,864 bytes"):
        Calibration.load(tmp_path / "report.json")


@pytest.fixture(scope="module")
def model() -> Any:
    return patch_model(tiny_model("llama", num_hidden_layers=1), REPORT.scheme)


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
def test_each_part_of_a_report(step, model, tmp_path, caplog):
    """Of a few thousand changes, those that are no report are left out, each with a warning that names the file."""
    assert passed_on(model, as_json(REPORT.to_dict()).encode(), tmp_path)
    left_out, changes = 0, [*variants(REPORT.to_dict())][::step]
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
def test_the_warning_names_the_field(path, model, tmp_path, caplog):
    assert not passed_on(model, as_json(changed(REPORT.to_dict(), path, NAMED[path])).encode(), tmp_path)
    assert path.replace("/", ".") in caplog.text


@pytest.mark.parametrize(
    "text", [b"\xff\xfe", b"[" * 10**5, b'{"a":' * 150 + b"1" + b"}" * 150, b'{"tokens": ' + b"9" * 5000 + b"}", b""]
)
def test_files_that_are_no_report(text, model, tmp_path, caplog):
    assert not passed_on(model, text, tmp_path)
    assert str(tmp_path / "in" / FILE) in caplog.text
