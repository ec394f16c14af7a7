"""The monitor's log: reading, logs of killed, resumed and other runs, and malformed logs."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from hf_qknorm.reports.records import LayerStatistics
from hf_qknorm.training import logit_log
from hf_qknorm.training.logit_log import LogitSample, append, log_file, read_log


def sample(step: int, *, layers: int = 2, heads: int = 3, size: float = 1.0) -> LogitSample:
    """A sample with made-up numbers of few digits."""
    row = tuple(size * (1 + step + head) for head in range(heads))
    layer = LayerStatistics(row, row, over_cap=(0.0,) * heads, grad_q=row, cap=50.0, even=2.5)
    return LogitSample(step, {f"layers.{i}": layer for i in range(layers)})


def test_samples_are_written_and_read(tmp_path):
    samples = [sample(3), sample(6, size=math.inf), sample(9, layers=1)]
    for one in samples:
        append(tmp_path / "log", one)
    assert read_log(tmp_path / "log") == samples
    append(tmp_path / "nan", sample(1, size=math.nan))
    assert math.isnan(read_log(tmp_path / "nan")[0].layers["layers.0"].max_logit[0])


def test_steps_that_a_resumed_run_took_again_count_once(tmp_path):
    for step, size in ((3, 1.0), (6, 1.0), (9, 1.0), (6, 2.0)):
        append(tmp_path / "log", sample(step, size=size))
    assert read_log(tmp_path / "log") == [sample(3), sample(6, size=2.0)]


def test_an_incomplete_last_line_is_ignored_and_removed(tmp_path):
    path = tmp_path / "log"
    text = sample(3).line() + sample(6).line()
    for end in range(len(sample(3).line()), len(text)):
        path.write_text(text[:end])
        assert [one.step for one in read_log(path)] == [3]
    append(log_file(path, resumed=True), sample(6))
    assert path.read_text() == text


def test_a_run_has_a_file_of_its_own(tmp_path):
    """Nothing is overwritten; a resumed run continues the last file."""
    path = tmp_path / "new" / "log.jsonl"
    files = []
    for step, resumed in ((3, False), (3, False), (6, True), (3, False)):
        files.append(log_file(path, resumed=resumed))
        append(files[-1], sample(step))
    assert [file.name for file in files] == ["log.jsonl", "log-2.jsonl", "log-2.jsonl", "log-3.jsonl"]
    assert [[one.step for one in read_log(file)] for file in (path, files[1], files[3])] == [[3], [3, 6], [3]]
    assert log_file(tmp_path / "other", resumed=True) == tmp_path / "other"
    assert log_file(tmp_path / "other", resumed=False) == tmp_path / "other"  # it is empty
    with pytest.raises(IsADirectoryError, match="new is a folder"):
        log_file(path.parent, resumed=False)


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
        (changed(step=-1), "step: Input should be greater than or equal to 0, got -1"),
        (changed(step=True), "step: Input should be a valid integer, got True"),
        (changed(layers={}), "layers: Dictionary should have at least 1 item"),
        (changed(layers={"a b": {}}), "'layers.a b.*String should match pattern"),
        (changed(entropy=None), "layers.0.entropy: Field required"),
        (changed(more=[1]), "layers.0.more: Unexpected keyword argument"),
        (changed(entropy=[1, "x", 2]), "entropy.1: Input should be a valid number, got 'x'"),
        (changed(entropy=[0] * 20_000), "entropy: Tuple should have at most 10000 items"),
        (changed(cap=0), "cap 0, expected 1e-6 to 1e6"),
        (changed(even=math.nan), "even nan, expected 0 to 100"),
        (changed(grad_q=3), "grad_q: Input should be a valid array, got 3"),
    ],
)
def test_errors_name_the_line(tmp_path, line, message):
    path = tmp_path / "log"
    path.write_text(sample(3).line() + line + "\n")
    with pytest.raises(ValueError, match=f"^{path}, line 2: .*({message})"):
        read_log(path)


def test_a_file_over_the_limit_is_refused(tmp_path, monkeypatch):
    append(tmp_path / "log", sample(1))
    monkeypatch.setattr(logit_log, "BYTES", 100)
    with pytest.raises(ValueError, match="log is larger than 100 bytes"):
        read_log(tmp_path / "log")
    with pytest.raises(FileNotFoundError, match="no such file: .*none"):
        read_log(tmp_path / "none")


def test_numbers_for_the_console_and_for_loggers():
    rows = {"a": (1.0, 9.0), "b": (3.0, 2.0)}
    shared = {"over_cap": (0.5, 0.0), "cap": 50.0, "even": 2.0, "bound": 12.0, "gain_k": 1.5}
    layers = {n: LayerStatistics(x, x, **shared) for n, x in rows.items()}
    one = LogitSample(7, layers)
    summary = {"attention/max_logit": 9.0, "attention/min_entropy": 1.0, "attention/max_bound": 12.0}
    assert one.summary() == summary
    assert str(one) == ("step 7: largest |logit| 9 (a, head 1), least entropy 1 nats (a, head 0), largest bound 12")
    assert one.scalars() == summary | {
        "attention/max_logit_layer": 0,
        "attention/max_logit_head": 1,
        "attention/over_cap": 0.25,
        "attention/max_logit/0": 9.0,
        "attention/max_logit/1": 3.0,
        "attention/max_gain": 1.5,
    }
