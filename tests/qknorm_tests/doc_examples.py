"""Where the examples of pages and docstrings run: a folder with small checkpoints and a text, and some names."""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import hf_qknorm as qk
from hf_qknorm.small_model import byte_tokenizer
from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "LICENSE").read_text(encoding="utf-8")
CHECKPOINTS = {"llama": "llama", "gpt2": "gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct": "llama"}  # name: type


def make_folder(folder: Path) -> Path:
    """Fill `folder` with tiny checkpoints of the names that pages give, with tokenizers, and the text `corpus.txt`."""
    for name, model_type in CHECKPOINTS.items():
        save_with_tokenizer(tiny_model(model_type, vocab_size=257, initializer_range=0.2), folder / name)
    (folder / "corpus.txt").write_text(TEXT, encoding="utf-8")
    return folder


def names(code: str) -> dict[str, Any]:
    """The names that `code` finds defined, when it runs in the folder of `make_folder`.

    `qk`, `torch`, `Path`, `Trainer`, `AutoModelForCausalLM`; `model`, an unpatched Llama; `texts`, a list of strings;
    `arguments` and `data` for a Trainer; and, if the code uses it, `trainer`, a Trainer of `model`.
    """
    model, tokens = AutoModelForCausalLM.from_pretrained("llama"), torch.tensor(byte_tokenizer()(TEXT)["input_ids"])
    options = {"max_steps": 3, "per_device_train_batch_size": 4, "save_strategy": "no"}
    options |= {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    defined = {
        "qk": qk,
        "torch": torch,
        "Path": Path,
        "Trainer": Trainer,
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "model": model,
        "texts": TEXT.split("\n\n"),
        "arguments": TrainingArguments("trained", **options),
        "data": [{"input_ids": row, "labels": row} for row in tokens.split(32)[:-1]],
    }
    if re.search(r"\btrainer\b", code):
        defined["trainer"] = Trainer(model, defined["arguments"], train_dataset=defined["data"])
        defined["trainer"].remove_callback(PrinterCallback)
    return defined
