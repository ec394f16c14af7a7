"""A script of the demo, for a new process: load a converted checkpoint, compare its logits, generate some text."""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_qknorm  # noqa: F401  (registers the converted checkpoint's classes)


def main(checkpoint: str, expected: str) -> dict[str, object]:
    """The difference of the checkpoint's logits from those in the file `expected`, and a generated text."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    stored = load_file(expected)
    with torch.no_grad():
        logits = model(input_ids=stored["input_ids"]).logits
    prompt = stored["input_ids"][:1, :64]
    torch.manual_seed(0)
    generated = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=120,
        do_sample=True,
        top_k=40,
        temperature=0.7,
        pad_token_id=tokenizer.pad_token_id,
    )
    return {
        "class": type(model).__name__,
        "largest_difference": float((logits - stored["logits"]).abs().max()),
        "prompt": tokenizer.decode(prompt[0]),
        "text": tokenizer.decode(generated[0, prompt.shape[1] :]),
    }


if __name__ == "__main__":
    json.dump(main(*sys.argv[1:3]), sys.stdout)
