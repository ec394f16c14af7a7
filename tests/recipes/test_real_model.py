"""The front page's lines on a real model, which `recipes/real_model.py` fetches: the default keeps its predictions."""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import real_model
import torch
from test_snippets import README, numbers, words
from transformers import AutoTokenizer

import hf_qknorm as qk
from hf_qknorm.measure.bounds import worst_bound
from hf_qknorm.measure.predictions import loss_of, predictions
from hf_qknorm.measure.text import load_text

FOLDER = real_model.FOLDER


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.exists(), reason="needs the real model: python recipes/real_model.py")
@torch.no_grad()
def test_the_front_page_is_true_of_a_real_model(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("HuggingFaceTB").mkdir()
    Path("HuggingFaceTB", real_model.NAME).symlink_to(FOLDER)
    Path("corpus.txt").symlink_to(shared / "data" / "wikitext2-valid.txt")
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(README.code, "README.md", "exec"), names)
    assert words(out.getvalue()) == words(README.output)
    assert numbers(out.getvalue()) == pytest.approx(numbers(README.output), rel=0.02, abs=2e-4)

    code = AutoTokenizer.from_pretrained(FOLDER)(load_text(None, limit=8000), return_tensors="pt")["input_ids"]
    judging = [{"input_ids": code[:, :1024].view(4, 256)}]
    base, own = predictions(names["model"], judging)
    assert own.kl < 0.005
    assert worst_bound(names["model"]) < 200  # 743 with a knee of 16 and a sharpness of 1
    assert abs(loss_of(qk.remove_norms(names["model"], judging), judging) - base.loss) < 0.002
