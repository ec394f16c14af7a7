"""A script of the demo, for a new process: load a converted checkpoint, and compare its logits with stored ones."""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_qknorm  # noqa: F401  (registers the converted checkpoint's classes)


def main(checkpoint: str, expected: str, threads: str) -> dict[str, object]:
    """The class of the checkpoint's model, and the largest difference of its logits from those in `expected`.

    `threads` is the number of threads that gave these, because the last digits of sums depend on it.
    """
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    AutoTokenizer.from_pretrained(checkpoint)  # raises if it was not saved
    stored = load_file(expected)
    with torch.no_grad():
        logits = model(input_ids=stored["input_ids"]).logits
    return {"class": type(model).__name__, "largest_difference": float((logits - stored["logits"]).abs().max())}


if __name__ == "__main__":
    json.dump(main(*sys.argv[1:]), sys.stdout)
