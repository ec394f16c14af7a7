"""The plots of a model card."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from matplotlib.image import imread

from hf_qknorm import SCHEMES, Calibration
from hf_qknorm.convert.card import write_card
from hf_qknorm.convert.card_plots import draw_report
from hf_qknorm.files.names import LOGITS_PLOT, LOSS_PLOT
from hf_qknorm.reports.records import LayerReport, LayerStatistics, Prediction
from qknorm_tests.card_cases import REPORT, checkpoint
from qknorm_tests.covering import covering


def test_a_drawing_that_fails_leaves_the_card(tmp_path, monkeypatch):
    (checkpoint(tmp_path) / "README.md").write_text("old")

    def fail(report: Calibration, folder: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("hf_qknorm.convert.card_plots.draw_report", fail)
    with pytest.raises(OSError, match="disk full"):
        write_card(tmp_path)
    assert (tmp_path / "README.md").read_text() == "old"


@pytest.mark.parametrize(("layers", "value"), covering([1, 60], [0.0, 3.0, 1e300, math.inf, math.nan], strength=1))
def test_any_numbers_can_be_drawn(tmp_path, layers, value):
    side = LayerStatistics((value, 1.0), (value, 2.0), *(((0.0, 0.0),) * 4))
    found = {f"layers.{i}": LayerReport(side, side, None, None, value) for i in range(layers)}
    predictions = Prediction(2.0), Prediction(value), Prediction(min(value, 3.0))
    report = Calibration("moments", 10, SCHEMES["qk_norm"].resolve(), 50.0, *predictions, found)
    assert draw_report(report, tmp_path) == [LOSS_PLOT, LOGITS_PLOT]
    for name, width in ((LOSS_PLOT, 1050), (LOGITS_PLOT, 1425)):
        assert imread(tmp_path / name).shape[1] == width


def test_the_plots_show_the_numbers(tmp_path, figures):
    report = Calibration.load(checkpoint(tmp_path) / REPORT)
    draw_report(report, tmp_path)
    losses, (left, right) = figures[0].axes[0], figures[1].axes
    shown = [line.get_xdata()[0] for line in losses.lines if line.get_marker() == "o"]
    assert shown == [report.base.loss, report.ones.loss, report.chosen.loss]
    assert [tick.get_text() for tick in losses.get_yticklabels()] == ["unpatched", "fresh gains", "this model"]
    for axes, field, worst in ((left, "max_logit", max), (right, "entropy", min)):
        for (heads, extremes), side in zip(
            (axes.collections[:2], axes.collections[2:4]), ("before", "after"), strict=True
        ):
            values = [getattr(getattr(layer, side), field) for layer in report.layers.values()]
            assert heads.get_offsets()[:, 0].tolist() == pytest.approx([x for row in values for x in row])
            assert extremes.get_offsets()[:, 0].tolist() == pytest.approx([worst(row) for row in values])
    (bounds,) = left.collections[4:]
    assert bounds.get_offsets()[:, 0].tolist() == pytest.approx([layer.bound for layer in report.layers.values()])
    assert not right.collections[4:]
