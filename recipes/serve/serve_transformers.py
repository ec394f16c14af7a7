"""Serve converted checkpoints with `transformers serve`, and compare its texts with `generate`.

    python recipes/serve/serve_transformers.py --checkpoint llama-shakespeare --text tinyshakespeare.txt

"converted" is the checkpoint with `qk_norm` and `exportable=True`, served by the code beside the weights
(`--trust-remote-code`), "exported" the Qwen3 that it becomes. The server runs on the CPU, from an environment of its
own, with and without `--continuous-batching`. Three prompts of the text are sent to /v1/completions at once, greedy, 32
tokens each. "equal" counts the texts that are those of `generate`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engines import environment, predictions, table, write_page
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_qknorm as qk

TOKENS, PORT, SERVER = 32, 8765, "5.19.0"


def ask(folder: Path, prompt: str) -> str:
    """The server's text behind a prompt, or its error."""
    body = {"model": str(folder), "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    url, head = f"http://127.0.0.1:{PORT}/v1/completions", {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        return f"error {error.code}: {error.read().decode()}"
    except OSError as error:
        return f"error: {error}"


def served(python: Path, folder: Path, prompts: list[str], *flags: str) -> list[str]:
    """The server's texts; its log is beside the checkpoint."""
    command = [python.parent / "transformers", "serve", "--trust-remote-code", "--device", "cpu"]
    with folder.with_suffix(".log").open("a") as log:
        server = subprocess.Popen([*command, "--port", str(PORT), *flags], stdout=log, stderr=log)
        try:
            for _ in range(120):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2)
                    break
                except OSError:
                    time.sleep(1)
            with ThreadPoolExecutor() as pool:
                return list(pool.map(lambda prompt: ask(folder, prompt), prompts))
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("serve-transformers"))
    parser.add_argument("--env", type=Path, help="an environment with transformers[serving], by default made in --work")
    parser.add_argument("--out", type=Path, default=Path("serve-transformers/page"))
    options = parser.parse_args()
    work = options.work.absolute()
    packages = ("torch==2.13.0", f"transformers[serving]=={SERVER}", "accelerate")
    python = environment(options.env or work / "venv", *packages)
    text = options.text.read_text()
    prompts = [text[start : start + 200] for start in (1000, 50_000, 90_000)]
    rows: list[list[str]] = []
    converted, exported = work / "converted", work / "exported"
    if not exported.exists():
        most: dict[str, Any] = {"data": str(options.text), "max_tokens": 2048, "exportable": True}
        qk.convert_checkpoint(options.checkpoint, converted, "qk_norm", **most)
        qk.export_native(converted, exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    for folder in (converted, exported):
        model = AutoModelForCausalLM.from_pretrained(folder)
        _, texts = predictions(model, tokenizer(prompts)["input_ids"], TOKENS)
        expected = tokenizer.batch_decode(texts, skip_special_tokens=True)
        for flags in ((), ("--continuous-batching", "--cb-max-memory-percent", "0.1")):
            found = served(python, folder, prompts, *flags)
            errors = [text for text in found if text.startswith("error")]
            equal = sum(one == other for one, other in zip(found, expected, strict=True))
            rows.append([folder.name, " ".join(flags) or "plain", f"{equal}/3", errors[0][:300] if errors else ""])
            print(*rows[-1], sep=" | ", flush=True)
    lines = table(["checkpoint", "transformers serve", "equal", "error"], rows, "llrl")
    write_page("Served by transformers", __doc__, {"transformers": SERVER}, lines, options.out)


if __name__ == "__main__":
    main()
