"""The writers of checkpoints that `kill_writers` kills, and the judgement of what they leave."""

from __future__ import annotations

import os
import shutil
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import test_helpers_path  # noqa: F401
import torch
from tiny import tiny_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_qknorm import convert_checkpoint, export_native, patch_model, unpatch_model
from hf_qknorm.demo.training import byte_tokenizer

ATOMIC = ("nothing", "old", "new")
IN_PLACE = ("nothing", "new", "refused", "usable")
TEXT = "to be, or not to be: that is the question. " * 40
SHARD = "2MB"
STEPS = 5  # of a training, each with a checkpoint
LIMIT = 120  # seconds that a process may take; one that hangs is a fault
FINE, RAISED, WRONG = 0, 3, 4  # exit statuses of a process that loads what is left


@dataclass(frozen=True)
class Writer:
    """A writer of a folder; `judge` classifies what a killed run leaves, given the result of a complete one."""

    write: Callable[[Path], object]
    judge: Callable[[Path, Path], str]
    may_leave: tuple[str, ...]
    old: Path | None = None  # the checkpoint that is there before


def forked(run: Callable[[], object], log: Path) -> int:
    """Fork a process that runs `run` and exits with the returned number, 0 without one, or 1 on an error; return its
    id.
    """
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.alarm(LIMIT)
        torch.set_num_threads(1)
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        result = run()
        status = result if isinstance(result, int) else 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def finished(run: Callable[[], object], log: Path) -> int:
    """Run `run` in a forked process, and return its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(forked(run, log), 0)[1])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def judge_bytes(left: Path, whole: Path, old: Path | None = None) -> str:
    """Classify by bytes: nothing, the old folder, the new one, or a fault."""
    if not left.exists():
        return "nothing"
    found = contents(left)
    if old is not None and found == contents(old):
        return "old"
    return "new" if found == contents(whole) else "fault"


def judge_saved(left: Path, whole: Path) -> str:
    """Classify by loading what is left and comparing its weights."""
    if not left.exists() or not any(left.iterdir()):
        return "nothing"
    if contents(left) == contents(whole):
        return "new"

    def load() -> int:
        expected = AutoModelForCausalLM.from_pretrained(whole)
        try:
            model = AutoModelForCausalLM.from_pretrained(left)
        except Exception:
            return RAISED
        return FINE if same_weights(model, expected) else WRONG

    return {FINE: "usable", RAISED: "refused"}.get(finished(load, left.with_name("load.log")), "fault")


def judge_training(left: Path, whole: Path, resume: Callable[[Path, Path], Any]) -> str:
    """Classify by resuming from the last checkpoint, and from the one before it if that raises an error."""
    log = left.with_name("resume.log")

    def status() -> int:
        def run() -> int:
            expected = AutoModelForCausalLM.from_pretrained(whole / f"checkpoint-{STEPS}")
            try:
                model = resume(left, left.with_name("resumed"))
            except Exception:
                return RAISED
            return FINE if same_weights(model, expected) else WRONG

        return finished(run, log)

    last = get_last_checkpoint(left) if left.exists() else None
    if last is None:
        return "nothing"
    found = status()
    if found == RAISED:
        shutil.rmtree(last)
        before = get_last_checkpoint(left)
        return "refused" if before is None or status() == FINE else "fault"
    return "new" if found == FINE else "fault"


def same_weights(model: Any, expected: Any) -> bool:
    state, other = model.state_dict(), expected.state_dict()
    return state.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in state.items())


def train(out: Path, resume: Path | None = None) -> Any:
    """Train a patched model and save a checkpoint at each step; or go on from the last one in `resume`, without."""
    model = patch_model(tiny_model("llama", vocab_size=2000, hidden_size=64, initializer_range=0.2), "qk_norm_cap")
    ids = torch.arange(64 * 32).view(64, 32) * 7 % 2000
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=STEPS,
        save_strategy="no" if resume else "steps",
        save_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    trainer.train(resume_from_checkpoint=None if resume is None else get_last_checkpoint(resume))
    return trainer.model


def make_sources(model: Any, plain: Path, patched: Path, old: Path) -> None:
    """Make a checkpoint to convert, one to export, and one to replace."""
    patch_model(model, "qk_norm").save_pretrained(patched, max_shard_size=SHARD)
    unpatch_model(model).save_pretrained(plain, max_shard_size=SHARD)
    byte_tokenizer().save_pretrained(plain)
    convert_checkpoint(plain, old, "soft_cap")


def make_writers(work: Path) -> dict[str, Writer]:
    """Return the writers by name, with their checkpoints in `work`.

    The work is done in other processes: progress bars and loading would start threads here, which do not survive a
    fork.
    """
    plain, patched, old = places = tuple(work / name for name in ("plain", "patched", "old"))
    model = tiny_model("llama", vocab_size=8000, hidden_size=128)
    if finished(partial(make_sources, model, *places), work / "sources.log"):
        raise RuntimeError(f"no checkpoints to start from:\n{(work / 'sources.log').read_text()}")
    patch_model(model, "qk_norm")
    convert = partial(convert_checkpoint, plain, scheme="qk_norm_cap", standalone=False)
    calibrated = partial(convert, calibration=[TEXT], method="moments")
    over = partial(judge_bytes, old=old)
    resume = lambda left, out: train(out, resume=left)  # noqa: E731
    return {
        "convert": Writer(convert, judge_bytes, ATOMIC),
        "convert, calibrated": Writer(calibrated, judge_bytes, ATOMIC),
        "convert over an old one": Writer(partial(convert, overwrite=True), over, ATOMIC, old),
        "convert with its code": Writer(partial(convert, standalone=True), judge_bytes, ATOMIC),
        "export over an old one": Writer(partial(export_native, patched, overwrite=True), over, ATOMIC, old),
        "save_pretrained": Writer(partial(model.save_pretrained, max_shard_size=SHARD), judge_saved, IN_PLACE),
        "Trainer": Writer(train, partial(judge_training, resume=resume), IN_PLACE),
    }
