"""When a check runs, what it is remembered by, and the places where none can run."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_qknorm.ops.error_budget import Verdict
from hf_qknorm.ops.trust import first_use, self_check, verdict_files
from hf_qknorm.ops.trust.code_path import CodePath
from hf_qknorm.ops.types import Norm
from qknorm_tests.operator_calls import call

CPU = torch.device("cpu")
SOUND, WRONG = Verdict(0.001, 0.002), Verdict(0.05, 0.002)
HEADS = [torch.zeros(2, n, 9, 16) for n in (4, 2, 2)]


class Checks:
    """Stands for the self-check, and counts its runs."""

    def __init__(self) -> None:
        self.paths: list[CodePath] = []
        self.result: Verdict | Exception = SOUND

    def __call__(self, path: CodePath, device: torch.device) -> self_check.Finding:
        self.paths.append(path)
        if isinstance(self.result, Exception):
            raise self.result
        return self_check.Finding("gradient of k", self.result)


@pytest.fixture(autouse=True)
def checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Checks:
    """Each test is a new process on a machine without verdicts, whose CPU counts as a GPU."""
    made = Checks()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(first_use.SWITCH, raising=False)
    monkeypatch.setattr(self_check, "check", made)
    monkeypatch.setattr(first_use, "CHECKED", ("cpu", "cuda"))
    restart(monkeypatch)
    return made


def restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget everything that a process remembers."""
    monkeypatch.setattr(first_use, "_reasons", {})
    monkeypatch.setattr(first_use, "_absent", set())
    first_use._warned.cache_clear()
    verdict_files._warn.cache_clear()


def asked(**options: Any) -> str | None:
    return first_use.why_distrusted(*call(*HEADS, **options))


def test_a_path_is_checked_once_a_process_and_once_a_machine(checks, monkeypatch, caplog):
    for _ in range(2):
        assert asked(causal=True) is asked(causal=True, scale=0.3) is None
        restart(monkeypatch)
    assert len(checks.paths) == 1
    assert asked() is None
    assert len(checks.paths) == 2
    assert not caplog.records


def test_a_failure_warns_once_with_its_figures_and_is_kept(checks, monkeypatch, caplog):
    checks.result = WRONG
    for _ in range(2):
        for _ in range(2):
            reason = asked(softcap=5.0, causal=True)
        assert len(checks.paths) == 1
        assert reason is not None
        for part in ("gradient of k", "5.0e-02", "2.0e-03", "a small cap, causal", f"torch {torch.__version__}"):
            assert part in reason
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        for part in (reason, "report", "hf_qknorm_tiled", "HF_QKNORM_CHECK=0", "hf_qknorm_triton"):
            assert part in record.getMessage()
        caplog.clear()
        restart(monkeypatch)


def test_an_error_of_nan_is_a_failure(checks):
    checks.result = Verdict(float("nan"), 0.1)
    assert "relative error of nan" in str(asked())


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"key": [], "reason": null}', "5", '{"reason": null}', b"\xff\xfe"], ids=repr
)
def test_a_corrupted_file_is_no_verdict(checks, monkeypatch, content):
    assert asked() is None
    (file,) = verdict_files.folder().iterdir()
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    restart(monkeypatch)
    assert asked() is None
    assert len(checks.paths) == 2
    assert json.loads(file.read_text())["reason"] is None


@pytest.mark.parametrize("name", ["machine", "_sources"])
def test_a_verdict_of_other_versions_is_none(checks, monkeypatch, name):
    assert asked() is None
    restart(monkeypatch)
    monkeypatch.setattr(verdict_files, name, lambda *_: "another")
    assert asked() is None
    assert len(checks.paths) == 2


@pytest.mark.parametrize("change", [lambda file: file.chmod(0o666), lambda file: file.parent.chmod(0o777)])
def test_a_verdict_that_others_may_write_is_none(change, checks, monkeypatch, caplog):
    checks.result = WRONG
    asked()
    (file,) = verdict_files.folder().iterdir()
    file.write_text(file.read_text().partition(', "reason"')[0] + ', "reason": null}')
    change(file)
    caplog.clear()
    for runs in (2, 3 if file.parent.stat().st_mode & 0o2 else 2):
        restart(monkeypatch)
        assert asked() is not None
        assert len(checks.paths) == runs
    first = caplog.records[0].getMessage()
    assert first.startswith(f"The verdicts on kernels are not read: {file.parent}")
    assert "with which other users may write to it" in first


@pytest.mark.parametrize("reason", ['"' + "x" * 2**20 + '"', "[" * 10_000], ids=["large", "deep"])
def test_a_verdict_that_is_no_small_file_is_none(reason, checks, monkeypatch):
    assert asked() is None
    (file,) = verdict_files.folder().iterdir()
    file.write_text(file.read_text().replace("null", reason))
    restart(monkeypatch)
    assert asked() is None
    assert len(checks.paths) == 2


@pytest.mark.parametrize(("value", "runs"), [("0", 0), ("1", 1)])
def test_the_switch(checks, monkeypatch, value, runs):
    checks.result = WRONG
    monkeypatch.setenv(first_use.SWITCH, value)
    assert (asked() is None) == (value == "0")
    assert len(checks.paths) == runs


def test_a_wrong_switch_is_refused(monkeypatch):
    monkeypatch.setenv(first_use.SWITCH, "off")
    with pytest.raises(ValueError, match="HF_QKNORM_CHECK must be 1 .* or 0 .*, got 'off'"):
        asked()


def test_the_interpreter_is_not_checked(checks, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(self_check, "check", checks)
    assert asked() is None
    assert not checks.paths


def traced(**options: Any) -> str | None:
    """The reason as a trace of one graph finds it."""
    torch._dynamo.reset()

    def ask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        reason = first_use.why_distrusted(*call(q, k, v, **options))
        return q + (0 if reason is None else 1)

    out = torch.compile(ask, backend="eager", fullgraph=True)(*HEADS)
    return "distrusted" if bool(out.any()) else None


@pytest.mark.parametrize("norms", [{}, {"q_norm": Norm("rms", torch.ones(16))}], ids=["plain", "raw"])
def test_a_trace_checks_nothing_and_takes_a_verdict(checks, monkeypatch, norms):
    checks.result = WRONG
    assert traced(**norms) is None
    assert not checks.paths
    assert asked(**norms) is not None
    assert traced(**norms) == "distrusted"
    restart(monkeypatch)
    assert traced(**norms) == "distrusted"
    assert len(checks.paths) == 1


def test_fake_tensors_and_a_backward_pass_check_nothing(checks):
    checks.result = WRONG
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in HEADS]
        assert first_use.why_distrusted(*call(*fake)) is None
    x = torch.ones(1, requires_grad=True)
    reasons = []
    y = x * 2
    y.register_hook(lambda grad: reasons.append(asked()))
    y.sum().backward()
    assert reasons == [None]
    assert not checks.paths
    assert asked() is not None


def test_errors_are_kept_if_they_broke_the_device(checks, monkeypatch):
    checks.result = RuntimeError("no space\nleft")
    assert "RuntimeError: no space left" in str(asked())
    assert not verdict_files.folder().exists()
    restart(monkeypatch)
    checks.result = torch.AcceleratorError("illegal access")
    assert "illegal access" in str(asked())
    restart(monkeypatch)
    assert "illegal access" in str(asked())
    assert len(checks.paths) == 2


def test_a_check_without_room_is_no_verdict(checks):
    checks.result = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        asked()
    checks.result = SOUND
    assert asked() is None


def test_threads_share_a_check(checks):
    threads = [threading.Thread(target=asked) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(checks.paths) == 1


def test_a_graph_capture_checks_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not first_use._can_check(SimpleNamespace(is_cuda=True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert first_use._can_check(SimpleNamespace(is_cuda=True))


def test_a_backward_pass_reads_the_disk_once(checks, monkeypatch):
    """Activation checkpointing runs each layer's forward there, at every step."""
    read, reads = verdict_files.read, []
    monkeypatch.setattr(verdict_files, "read", lambda *key: reads.append(key) or read(*key))
    monkeypatch.setattr(first_use, "_can_check", lambda q: False)
    assert asked() is asked() is None
    assert len(reads) == 1
