"""The plots of an inspection: their content, for models of any shape."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

from hf_qknorm import SCHEMES, Inspection
from hf_qknorm.inspection.advice import advise
from hf_qknorm.inspection.plots import heat_map, knee_curve
from hf_qknorm.inspection.report import KneeTrial, KneeTrials
from hf_qknorm.reports.records import LayerStatistics


def inspection(layers: int, heads: int, size: float = 10.0, cap: float = 50.0) -> Inspection:
    """An inspection with made-up numbers."""
    generator = torch.Generator().manual_seed(0)
    logits = size * torch.exp(torch.randn(layers, heads, generator=generator))
    entropy = torch.rand(layers, heads, generator=generator) * 4
    entropy[0, 0] = 0.01  # a head that attends to one key
    found = {
        f"layers.{i}": LayerStatistics(
            tuple(logits[i].tolist()),
            tuple(entropy[i].tolist()),
            *((0.0,) * heads,) * 2,
            *((1.0,) * heads,) * 2,
            even=4.5,
        )
        for i in range(layers)
    }
    known = Inspection("made/up", "llama", 4096, 256, cap, found)
    return dataclasses.replace(known, advice=advise(known))


def test_both_maps_show_the_numbers(figures, tmp_path):
    found = inspection(4, 4, size=60.0)
    heat_map(found, tmp_path / "map.png")
    left, middle, right, *_ = figures[0].axes
    for axes, field in ((left, "max_logit"), (middle, "entropy")):
        shown = torch.tensor(axes.images[0].get_array().tolist())
        expected = torch.tensor([getattr(layer, field) for layer in found.layers.values()])
        torch.testing.assert_close(shown, expected)
        assert len(axes.texts) == 16
    assert [bar.get_width() for bar in right.patches] == [max(layer.max_logit) for layer in found.layers.values()]
    assert axes.texts[0].get_text() == f"{found.layers['layers.0'].entropy[0]:.1f}"
    collapsed = sum(len(risk.collapsed) for risk in found.risks)
    assert collapsed > 0
    assert len(middle.collections[0].get_paths()) == collapsed


def test_a_failed_drawing_leaves_the_old_one(monkeypatch, tmp_path):
    (tmp_path / "map.png").write_text("old")

    def fail(self: Figure, path: object, **options: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        heat_map(inspection(2, 2), tmp_path / "map.png")
    assert (tmp_path / "map.png").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def with_knees(rises: dict[float, tuple[float, float | None]], largest: float = 10.0) -> Inspection:
    """An inspection with the rise in loss and the bound at each knee."""
    trials = tuple(KneeTrial(knee, rise, 0.0, bound) for knee, (rise, bound) in rises.items())
    return dataclasses.replace(inspection(2, 2, largest), knees=KneeTrials(SCHEMES["qk_norm_cap"], 1.0, 0.01, trials))


RISES = {
    "usual": {0.0: (0.4, 36.0), 1.0: (0.08, 70.0), 4.0: (0.005, 170.0), 8.0: (0.002, 300.0)},
    "lower than unpatched": {0.0: (0.1, 36.0), 4.0: (-0.002, 170.0)},
    "none is kept": {0.0: (0.4, 36.0), 4.0: (0.1, 170.0)},
    "not finite": {0.0: (math.nan, 36.0), 1.0: (0.1, math.inf), 2.0: (0.1, None), 4.0: (0.1, 170.0)},
    "nothing to draw": {0.0: (math.nan, 36.0)},
    "huge": {0.0: (50.0, 1e7), 4.0: (0.001, 1e9)},
}


@pytest.mark.parametrize("rises", RISES.values(), ids=RISES)
@pytest.mark.parametrize("largest", [0.01, 10.0, 1e5])
def test_any_knees_can_be_drawn(tmp_path, rises, largest):
    knee_curve(with_knees(rises, largest), tmp_path / "knees.png")
    height, width, _ = imread(tmp_path / "knees.png").shape
    assert (height, width) == (720, 1200)


def test_the_plot_of_knees_has_points_lines_and_the_chosen_knee(figures, tmp_path):
    found = with_knees(RISES["usual"])
    knee_curve(found, tmp_path / "knees.png")
    (axes,) = figures[0].axes
    limit, seen, curve, *points = axes.lines
    assert set(limit.get_ydata()) == {0.01}
    assert set(seen.get_xdata()) == {found.largest}
    assert list(curve.get_xdata()) == [36, 70, 170, 300]
    assert list(curve.get_ydata()) == [0.4, 0.08, 0.005, 0.002]
    filled = [point.get_markerfacecolor() == point.get_color() for point in points]
    assert filled == [False, False, False, True]
    labels = [text.get_text() for text in axes.texts]
    assert {"knee 0", "knee 1", "knee 4", "knee 8, chosen"} < set(labels)
