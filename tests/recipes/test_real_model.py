"""The default conversion keeps its promise on a real model, which `recipes/real_model.py` fetches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import real_model
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_qknorm as qk
from hf_qknorm.measure.bounds import worst_bound
from hf_qknorm.measure.predictions import loss_of, predictions
from hf_qknorm.measure.text import load_text

FOLDER = real_model.FOLDER
PAGES = Path(qk.__file__).parent  # prose to calibrate on


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.exists(), reason="needs the real model: python recipes/real_model.py")
@torch.no_grad()
def test_the_default_keeps_a_real_model_and_comes_off():
    model: Any = AutoModelForCausalLM.from_pretrained(FOLDER).eval()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    prose = "\n".join(path.read_text(encoding="utf-8") for path in sorted(PAGES.rglob("*.md")))
    code = tokenizer(load_text(None, limit=8000), return_tensors="pt")["input_ids"][:, :1024]
    judging = [{"input_ids": code.view(4, 256)}]
    qk.patch_model(model, "qk_norm")
    report = qk.calibrate(model, [prose], max_tokens=16_384)
    assert report.base is not None
    assert report.chosen.loss - report.base.loss < 0.003
    assert report.chosen.kl < 0.004
    bound = worst_bound(model)
    assert bound is not None
    assert bound < 200  # 743 with a knee of 16 and a sharpness of 1
    base, own = predictions(model, judging)
    assert own.kl < 0.005
    assert abs(loss_of(qk.remove_norms(model, judging), judging) - base.loss) < 0.002
