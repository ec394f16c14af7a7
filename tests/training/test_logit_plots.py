"""The plot of a monitor's log: its content, for logs of any size."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from matplotlib.image import imread

from hf_qknorm.reports.records import LayerStatistics
from hf_qknorm.training.logit_log import LogitSample
from hf_qknorm.training.logit_plots import WORST, draw_log
from qknorm_tests.covering import covering


def samples(count, layers, heads, size=10.0):
    """A log with made-up numbers."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        rows = [size * torch.exp(torch.randn(heads, generator=generator)) for _ in range(layers)]
        entropies = [torch.rand(heads, generator=generator) * 4 for _ in range(layers)]
        kept = {
            f"layers.{n}": LayerStatistics(
                tuple(a.tolist()), tuple(b.tolist()), rms_q=(1.0,), rms_k=(1.0,), rms_v=(1.0,), cap=50.0, even=4.5
            )
            for n, (a, b) in enumerate(zip(rows, entropies, strict=True))
        }
        made.append(LogitSample(10 * i, kept))
    return made


SIZES = [(1, 1, 1), (12, 2, 4), (20, 20, 4), (1001, 3, 2)]


@pytest.mark.parametrize(
    ("shape", "size"), covering(SIZES, [0.0, 10.0, 1e300, math.inf, math.nan], strength=1), ids=str
)
def test_any_log_can_be_drawn(tmp_path, shape, size):
    count, layers, heads = shape
    draw_log(samples(count, layers, heads, size), tmp_path / "map.png")
    height, width, _ = imread(tmp_path / "map.png").shape
    assert 1300 < height <= 2200
    assert width == 1800
    assert [path.name for path in tmp_path.iterdir()] == ["map.png"]


def test_curves_are_those_of_the_worst_heads(figures, tmp_path):
    found = samples(12, 3, 4)
    draw_log(found, tmp_path / "map.png")
    _, _, logits, entropies, *_ = figures[0].axes
    first = [line for line in logits.lines if not line.get_label().startswith("_")]
    assert len(first) == WORST
    layer, head, _ = max((s.worst() for s in found), key=lambda worst: worst[2])
    assert first[0].get_label() == f"layer {layer.removeprefix('layers.')}, head {head}"
    assert list(first[0].get_ydata()) == [s.layers[layer].max_logit[head] for s in found]
    least = min(min(line.get_ydata()) for line in entropies.lines)
    assert least == min(s.sharpest()[2] for s in found)


def test_each_layer_has_a_curve_of_its_outputs(figures, tmp_path):
    found = samples(5, 3, 2)
    for i, one in enumerate(found):
        for n, name in enumerate(one.layers):
            one.layers[name] = replace(one.layers[name], rms_out=1.0 + n + i, rms_mlp=math.nan if i == 2 else 2.0 + i)
    draw_log(found, tmp_path / "map.png")
    *_, qkv, out, mlp = figures[0].axes
    assert [len(axes.lines) for axes in (qkv, out, mlp)] == [3, 3, 3]
    assert [list(line.get_ydata()) for line in out.lines] == [[1.0 + n + i for i in range(5)] for n in range(3)]
    assert math.isnan(mlp.lines[0].get_ydata()[2])
    assert list(qkv.lines[0].get_ydata()) == [1.0] * 5
    assert out.get_yscale() == "log"


def test_an_empty_log_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no sample yet"):
        draw_log([], tmp_path / "map.png")
