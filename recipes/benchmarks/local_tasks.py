"""Tasks for lm-eval that are made from a text: the last word of a passage, and how a passage goes on.

"cloze": a passage of 40 to 80 words from one paragraph, at whose end a sentence lacks its last word, as in LAMBADA
(Paperno et al. 2016, arXiv 1606.06031). The word has four letters or more and occurs in the passage before. An answer
is right if the model's most likely tokens are those of the word. "continuation": after 40 words of a paragraph, the
next 12 and those of three other paragraphs; the most likely one is the answer.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CLOZE = """\
task: cloze
output_type: loglikelihood
doc_to_text: "{{text}}"
doc_to_target: " {{word}}"
target_delimiter: ""
"""
CONTINUATION = """\
task: continuation
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
"""
DATA = """\
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
metric_list: [{{metric: acc}}]
"""
TASKS = {"cloze": CLOZE, "continuation": CONTINUATION}
SHORTEST, LONGEST, START, NEXT = 40, 80, 40, 12  # words

Answers = dict[str, list[bool]]  # by task: whether each answer is right


def write_tasks(text: str, folder: Path, count: int) -> None:
    """Write both tasks, with up to `count` questions each, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {"cloze": cloze(text), "continuation": continuation(text)}
    for name, questions in made.items():
        chosen = random.Random(0).sample(found := list(questions), min(count, len(found)))
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, chosen)), encoding="utf-8")
        (folder / f"{name}.yaml").write_text(TASKS[name] + DATA.format(path=folder / f"{name}.jsonl"), encoding="utf-8")


def paragraphs(text: str) -> list[list[str]]:
    """The words of each paragraph long enough for both tasks, full stops among them; "=" begins a heading."""
    lines = (line for line in text.splitlines() if not line.strip().startswith("="))
    found = (re.sub(r"\.(?=\s|$)", " .", line).split() for line in lines)
    return [words for words in found if len(words) >= START + NEXT]


def cloze(text: str) -> Iterator[dict[str, Any]]:
    """The first passage of each paragraph that has one, and the word that ends it."""
    for words in paragraphs(text):
        for end in range(SHORTEST, min(LONGEST, len(words) - 1)):
            word = words[end]
            if words[end + 1] == "." and re.fullmatch(r"[A-Za-z]{4,}", word) and word in words[:end]:
                yield {"text": " ".join(words[:end]), "word": word}
                break


def continuation(text: str) -> Iterator[dict[str, Any]]:
    """A question for each paragraph."""
    found, chance = paragraphs(text), random.Random(0)
    for place, words in enumerate(found):
        others = chance.sample([other for other in range(len(found)) if other != place], 3)
        ends = [" ".join(found[each][START : START + NEXT]) for each in (place, *others)]
        answer = chance.randrange(4)
        ends[0], ends[answer] = ends[answer], ends[0]
        yield {"text": " ".join(words[:START]), "choices": ends, "answer": answer}


def answers(checkpoint: Path | str, tasks: Path, out: Path) -> Answers:
    """Run lm-eval's command on a checkpoint, with its own code, and return the answers to both tasks.

    Raises RuntimeError if it fails.
    """
    model = f"pretrained={checkpoint},trust_remote_code=True"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", model, "--device", "cpu"]
    command += ["--tasks", *TASKS, "--include_path", str(tasks), "--batch_size", "8"]
    command += ["--output_path", str(out), "--log_samples"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, env=offline, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"lm-eval failed (pip install 'lm-eval>=0.4.13' brings it):\n{done.stderr[-2000:]}")
    found = {}
    for name in TASKS:
        (path,) = out.rglob(f"samples_{name}_*.jsonl")
        rows = sorted(map(json.loads, path.read_text(encoding="utf-8").splitlines()), key=lambda row: row["doc_id"])
        found[name] = [bool(row["acc"]) for row in rows]
    return found
