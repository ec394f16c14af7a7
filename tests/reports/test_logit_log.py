"""The monitor's log: reading, logs of killed and resumed runs, and malformed logs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hf_qknorm import LogitMonitor
from hf_qknorm.reports import logit_log
from hf_qknorm.reports.logit_log import LogitSample, read_log
from hf_qknorm.reports.records import LayerStatistics


def sample(step: int, *, layers: int = 2, heads: int = 3, size: float = 1.0) -> LogitSample:
    """A sample with made-up numbers of few digits."""
    row = tuple(size * (1 + step + head) for head in range(heads))
    layer = LayerStatistics(row, row[::-1], over_cap=(0.0,) * heads, gain_k=1.5, bound=12.0, cap=50.0, even=2.5)
    return LogitSample(step, {f"layers.{i}": layer for i in range(layers)})


def written(path: Path, *samples: LogitSample) -> Path:
    path.write_text("".join(one.line() for one in samples))
    return path


def test_samples_are_written_and_read(tmp_path):
    """Where a resumed run took steps again, the later ones count."""
    samples = [sample(3), sample(6, size=math.inf), sample(9, layers=1)]
    assert read_log(written(tmp_path / "log", *samples)) == samples
    assert read_log(written(tmp_path / "log", *samples, sample(6))) == [sample(3), sample(6)]
    assert math.isnan(read_log(written(tmp_path / "log", sample(1, size=math.nan)))[0].layers["layers.0"].max_logit[0])


def test_an_incomplete_last_line_is_ignored_and_removed(tmp_path):
    first, text = sample(3).line(), sample(3).line() + sample(6).line()
    for end in (len(first), len(first) + 1, len(text) - 1):
        (tmp_path / "log").write_text(text[:end])
        assert read_log(tmp_path / "log") == [sample(3)]
        LogitMonitor(path=tmp_path / "log")
        assert (tmp_path / "log").read_text() == first


def test_a_monitor_refuses_a_path_that_is_no_log_and_leaves_it_alone(tmp_path):
    for text, message in (
        ('{"text": "a"}\n{"text": "b"}', ", line 1: sample: "),
        ("no end", " ends in something else"),
    ):
        (tmp_path / "data.jsonl").write_text(text)
        with pytest.raises(ValueError, match=f"data.jsonl{message}"):
            LogitMonitor(path=tmp_path / "data.jsonl")
        assert (tmp_path / "data.jsonl").read_text() == text
    with pytest.raises(IsADirectoryError, match="is a folder"):
        LogitMonitor(path=tmp_path)


def changed(**fields: Any) -> str:
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
        ("[]", "Input should be an object"),
        (changed(format=9), "format: Input should be 1, got 9"),
        (changed(step=True), "step: Input should be a valid integer, got True"),
        (changed(layers={}), "layers: Dictionary should have at least 1 item"),
        (changed(layers={"a b": {}}), "'layers.a b.*String should match pattern"),
        (changed(entropy=None), "layers.0.entropy: Field required"),
        (changed(more=[1]), "layers.0.more: Unexpected keyword argument"),
        (changed(entropy=[0] * 20_000), "entropy: Tuple should have at most 10000 items"),
        (changed(cap=0), "cap 0, expected 1e-6 to 1e6"),
        (changed(even=math.nan), "even nan, expected 0 to 100"),
    ],
)
def test_errors_name_the_line(tmp_path, line, message):
    path = tmp_path / "log"
    path.write_text(sample(3).line() + line + "\n")
    with pytest.raises(ValueError, match=f"^{path}, line 2: .*({message})"):
        read_log(path)


def test_a_file_over_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(logit_log, "BYTES", 100)
    with pytest.raises(ValueError, match="log is larger than 100 bytes"):
        read_log(written(tmp_path / "log", sample(1)))
    with pytest.raises(FileNotFoundError, match="no such file: .*none"):
        read_log(tmp_path / "none")


def test_numbers_for_the_console_and_for_loggers():
    one = LogitSample(7, {"a": sample(1).layers["layers.0"], "b": sample(5).layers["layers.0"]})
    summary = {"attention/max_logit": 8.0, "attention/min_entropy": 2.0, "attention/max_bound": 12.0}
    assert one.summary() == summary
    assert str(one) == "step 7: largest |logit| 8 (b, head 2), least entropy 2 nats (a, head 2), largest bound 12"
    layers = {"attention/max_logit/0": 4.0, "attention/max_logit/1": 8.0}
    assert one.scalars() == summary | layers | {"attention/max_over_cap": 0.0, "attention/max_gain_k": 1.5}
    broken = sample(1, size=math.nan).scalars()
    assert all(math.isnan(broken[f"attention/{name}"]) for name in ("max_logit", "min_entropy", "max_logit/1"))
