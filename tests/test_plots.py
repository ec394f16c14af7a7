"""The figures: they show the numbers, of models and logs of any size, also of numbers that are not finite."""

import math
from dataclasses import replace

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

from hf_qknorm import SCHEMES, Calibration
from hf_qknorm.plots import draw_calibration, draw_inspection, draw_log, save_figure
from hf_qknorm.reports.inspection import Inspection
from hf_qknorm.reports.logit_log import LogitSample
from hf_qknorm.reports.records import LayerReport, LayerStatistics, Prediction
from qknorm_tests.covering import covering

VALUES = [0.0, 1e300, math.inf, math.nan]


def made_up(layers: int, heads: int, size: float, seed: int = 0) -> dict[str, LayerStatistics]:
    """Layers with distinct numbers around `size`."""
    generator = torch.Generator().manual_seed(seed)
    logits = (size * torch.exp(torch.randn(layers, heads, generator=generator))).tolist()
    entropy = (torch.rand(layers, heads, generator=generator) * 4).tolist()
    return {
        f"layers.{i}": LayerStatistics(tuple(a), tuple(b), *((0.0,) * heads,) * 2, even=4.5, cap=50.0, bound=40.0 + i)
        for i, (a, b) in enumerate(zip(logits, entropy, strict=True))
    }


def calibration(layers: int, size: float) -> Calibration:
    before, after = made_up(layers, 4, 3 * size), made_up(layers, 4, size, seed=1)
    found = {name: LayerReport(before[name], after[name]) for name in before}
    predictions = Prediction(2.0), Prediction(3.0), Prediction(2.1)
    return Calibration(10, SCHEMES["qk_norm_cap"].resolve(), 50.0, *predictions, found)


def inspection(layers: int, heads: int, size: float = 10.0) -> Inspection:
    return Inspection("made/up", "llama", 4096, 256, 50.0, made_up(layers, heads, size))


def samples(count: int, layers: int, heads: int, size: float = 10.0) -> list[LogitSample]:
    return [LogitSample(10 * i, made_up(layers, heads, size, seed=i)) for i in range(count)]


SIZES = [(1, 1, 1), (12, 2, 4), (20, 20, 4), (1001, 3, 2)]
PICTURES = {
    f"{draw.__name__}, {arguments}": (draw, make, arguments)
    for draw, make, cases in (
        (draw_calibration, calibration, covering([1, 60], VALUES, strength=1)),
        (draw_log, samples, [(*shape, value) for shape, value in covering(SIZES, VALUES, strength=1)]),
        (draw_inspection, inspection, [(60, 2, 0.01), (2, 40, 1e300), (2, 2, math.nan)]),
    )
    for arguments in cases
}


@pytest.mark.parametrize(("draw", "make", "arguments"), PICTURES.values(), ids=PICTURES)
def test_any_numbers_can_be_drawn(tmp_path, draw, make, arguments):
    draw(make(*arguments), tmp_path / "picture.png")
    height, width, _ = imread(tmp_path / "picture.png").shape
    assert 400 < height <= 1800
    assert 900 < width <= 2600
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


def test_a_failed_drawing_leaves_the_old_one(monkeypatch, tmp_path):
    (tmp_path / "map.png").write_text("old")

    def fail(self: Figure, path: object, **options: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        save_figure(Figure(), tmp_path / "map.png")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_calibration_shows_each_head_the_worst_ones_and_the_bounds(tmp_path, figures):
    report = calibration(3, 10.0)
    draw_calibration(report, tmp_path / "picture.png")
    left, right = figures[0].axes
    for axes, field, worst in ((left, "max_logit", max), (right, "entropy", min)):
        for place, side in enumerate(("before", "after")):
            heads, extremes = axes.collections[2 * place : 2 * place + 2]
            values = [getattr(getattr(layer, side), field) for layer in report.layers.values()]
            assert heads.get_offsets()[:, 0].tolist() == pytest.approx([x for row in values for x in row])
            assert extremes.get_offsets()[:, 0].tolist() == pytest.approx([worst(row) for row in values])
    (bounds,) = left.collections[4:]
    assert bounds.get_offsets()[:, 0].tolist() == [40, 41, 42]
    assert not right.collections[4:]
    assert {text.get_text() for text in figures[0].legends[0].texts} >= {"unpatched", "calibrated", "cap 50"}


def test_an_inspection_shows_every_head(figures, tmp_path):
    found = inspection(4, 4, size=60.0)
    draw_inspection(replace(found, model=f"/{'long' * 40}/made-up"), tmp_path / "map.png")
    assert figures[0].get_suptitle().startswith("made-up: llama, 4 layers")
    assert max(map(len, figures[0].get_suptitle().splitlines())) < 90
    left, right, *_ = figures[0].axes
    for axes, field in ((left, "max_logit"), (right, "entropy")):
        shown = torch.tensor(axes.images[0].get_array().tolist())
        torch.testing.assert_close(shown, torch.tensor([getattr(layer, field) for layer in found.layers.values()]))


@pytest.mark.parametrize("count", [3, 1001])
def test_a_log_is_a_map_of_layers_and_steps_with_the_worst_head_of_each(figures, tmp_path, count):
    found = samples(count, 3, 2)
    draw_log(found, tmp_path / "map.png")
    left, right, *_ = figures[0].axes
    for axes, field, worst in ((left, "max_logit", max), (right, "entropy", min)):
        shown = axes.images[0].get_array()
        assert shown.shape == (3, min(count, 334))
        expected = [worst(worst(getattr(x.layers[f"layers.{i}"], field)) for x in found) for i in range(3)]
        assert [worst(row) for row in shown.tolist()] == expected
