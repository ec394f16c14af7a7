"""Evaluate a checkpoint where hf_qknorm can't be imported: `python lm_eval_alone.py FOLDER TASKS OUT`.

Runs the command of lm-eval, and transformers' pipeline, whose text is written to `OUT/text`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.modules["hf_qknorm"] = None  # type: ignore[assignment]  # before anything that could import it

from transformers import pipeline  # noqa: E402


def main(folder: str, tasks: str, out: str) -> None:
    generate = pipeline("text-generation", model=folder, trust_remote_code=True, device="cpu")
    if not type(generate.model).__module__.startswith("transformers_modules"):
        raise SystemExit(f"{type(generate.model).__module__} is not the checkpoint's own code")
    text = generate("ab", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    Path(out).mkdir()
    Path(out, "text").write_text(text, encoding="utf-8")
    model = ["--model", "hf", "--model_args", f"pretrained={folder},trust_remote_code=True", "--device", "cpu"]
    task = ["--tasks", "letters,words", "--include_path", tasks, "--batch_size", "4"]
    sys.argv = ["lm_eval", "run", *model, *task, "--output_path", out]
    runpy.run_module("lm_eval", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
