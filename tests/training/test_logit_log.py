"""The monitor's log: reading, logs of killed runs, and malformed logs."""

from __future__ import annotations

import json
import math

import pytest

from hf_qknorm.reports.records import LayerStatistics
from hf_qknorm.training import logit_log
from hf_qknorm.training.logit_log import LogitSample, append, continue_log, read_log


def sample(step: int, *, layers: int = 2, heads: int = 3, size: float = 1.0) -> LogitSample:
    """A sample with made-up numbers of few digits."""
    row = tuple(size * (1 + step + head) for head in range(heads))
    lengths = {"rms_q": row, "rms_k": row[:1], "rms_v": row[:1], "grad_q": row}
    layer = LayerStatistics(row, row, over_cap=(0.0,) * heads, **lengths, cap=50.0, even=2.5)
    return LogitSample(step, {f"layers.{i}": layer for i in range(layers)})


def test_samples_are_written_and_read(tmp_path):
    samples = [sample(3), sample(6, size=math.inf), sample(9, layers=1)]
    for one in samples:
        append(tmp_path / "log", one)
    assert read_log(tmp_path / "log") == samples
    assert math.isnan(read_nan(tmp_path).layers["layers.0"].max_logit[0])


def read_nan(folder):
    append(folder / "nan", sample(1, size=math.nan))
    return read_log(folder / "nan")[0]


def test_an_incomplete_last_line_is_ignored(tmp_path):
    path = tmp_path / "log"
    text = sample(3).line() + sample(6).line()
    for end in range(len(sample(3).line()), len(text)):
        path.write_text(text[:end])
        assert [one.step for one in read_log(path)] == [3]
    continue_log(path, 4, resumed=True)
    append(path, sample(6))
    assert path.read_text() == text


def test_continuing_removes_later_samples(tmp_path):
    path = tmp_path / "new" / "log"
    continue_log(path, 0, resumed=False)
    assert path.read_text() == ""
    for step in (3, 6, 9):
        append(path, sample(step))
    continue_log(path, 7, resumed=True)
    assert [one.step for one in read_log(path)] == [3, 6]
    with pytest.raises(FileExistsError, match="holds samples of another run, from step 3 on"):
        continue_log(path, 0, resumed=False)
    continue_log(path, 2, resumed=True)
    assert read_log(path) == []


@pytest.mark.parametrize("newer", ["", ',"gain_q":null,"gain_k":1.5,"bound":null,"rms_out":2.0,"rms_mlp":null'])
def test_logs_of_earlier_versions_are_read(tmp_path, newer):
    """They have a null for each number that is not known."""
    row = '"max_logit":[9.0],"entropy":[1.0],"over_cap":[0.0],"rms_q":[3.0],"rms_k":null,"rms_v":[4.0]'
    layer = f'{{"cap":50.0,"even":2.0,{row},"grad_q":null,"grad_k":null{newer}}}'
    (tmp_path / "log").write_text(f'{{"format":1,"step":3,"layers":{{"layers.0":{layer}}}}}\n')
    (one,) = read_log(tmp_path / "log")
    found = one.layers["layers.0"]
    assert (found.cap, found.even, found.max_logit, found.rms_k, found.grad_q) == (50.0, 2.0, (9.0,), None, None)
    assert (found.rms_out, found.gain_k) == ((2.0, 1.5) if newer else (None, None))
    assert found.rms_qkv == pytest.approx(math.sqrt((9 + 16) / 2))


def changed(**fields):
    """A line with other entries in its first layer; None removes an entry."""
    data = json.loads(sample(5).line())
    layer = data["layers"]["layers.0"]
    for name, value in fields.items():
        where = data if name in data else layer
        where[name] = value
        if value is None:
            del where[name]
    return json.dumps(data)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "Invalid JSON"),
        ("[" * 100_000, "Invalid JSON: recursion limit exceeded"),
        ('{"a":' * 200 + "1" + "}" * 200, "step: Field required; .*a: Unexpected keyword argument"),
        ("[]", "Input should be an object"),
        (changed(format=9), "format: Input should be 1, got 9"),
        (changed(step=-1), "step: Input should be greater than or equal to 0, got -1"),
        (changed(step=True), "step: Input should be a valid integer, got True"),
        (changed(step=2), "sample.step is 2, expected more than 3"),
        (changed(layers={}), "layers: Dictionary should have at least 1 item"),
        (changed(layers={"a b": {}}), "layers.'a b'.*String should match pattern"),
        (changed(entropy=None), "layers.0.entropy: Field required"),
        (changed(more=[1]), "layers.0.more: Unexpected keyword argument"),
        (changed(entropy="x"), "layers.0.entropy: Input should be a valid array, got 'x'"),
        (changed(entropy=[1, "x", 2]), "entropy.1: Input should be a valid number, got 'x'"),
        (changed(entropy=[1]), "of different lengths"),
        (changed(max_logit=[1, 2], entropy=[1, 2], over_cap=[0, 0]), "has 2 heads, and 3 before"),
        (changed(entropy=[0] * 20_000), "entropy: Tuple should have at most 10000 items"),
        (changed(cap=0), "cap 0, expected 1e-6 to 1e6"),
        (changed(cap=1e300), "expected 1e-6 to 1e6"),
        (changed(even=math.nan), "even nan, expected 0 to 100"),
        (changed(grad_q=3), "grad_q: Input should be a valid array, got 3"),
    ],
)
def test_errors_name_the_line(tmp_path, line, message):
    path = tmp_path / "log"
    path.write_text(sample(3).line() + line + "\n")
    with pytest.raises(ValueError, match=f"^{path}, line 2: .*({message})"):
        read_log(path)


@pytest.mark.parametrize(("limit", "most"), [("LINE_BYTES", 100), ("FILE_BYTES", 1000), ("NUMBERS", 100)])
def test_files_over_the_limits_are_refused(tmp_path, monkeypatch, limit, most):
    for step in range(1, 9):
        append(tmp_path / "log", sample(step))
    monkeypatch.setattr(logit_log, limit, most)
    with pytest.raises(ValueError, match=r"log, line \d: .*(larger|more) than"):
        read_log(tmp_path / "log")


def test_worst_and_sharpest():
    rows = {"a": (1.0, 9.0), "b": (3.0, 2.0)}
    shared = {"over_cap": (0.5, 0.0), "cap": 50.0, "even": 2.0}
    layers = {n: LayerStatistics(x, x, rms_q=x, rms_k=x, rms_v=x, **shared) for n, x in rows.items()}
    one = LogitSample(7, layers)
    assert one.worst() == ("a", 1, 9.0)
    assert one.sharpest() == ("a", 0, 1.0)
    assert one.scalars() == {
        "attention/max_logit": 9.0,
        "attention/max_logit_layer": 0,
        "attention/max_logit_head": 1,
        "attention/min_entropy": 1.0,
        "attention/over_cap": 0.25,
        "attention/max_logit/0": 9.0,
        "attention/max_logit/1": 3.0,
        "attention/max_rms_qkv": pytest.approx(math.sqrt((1 + 81) / 2)),
    }
