"""lm-eval and transformers' pipeline, without hf_qknorm, give a converted checkpoint the scores that it has with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_qknorm import convert_checkpoint
from qknorm_tests.children import child
from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.tables import randomise
from qknorm_tests.tiny import tiny_model

pytest.importorskip("lm_eval")

LETTERS = """\
task: letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/letters.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: byte_perplexity}}]
"""
WORDS = """\
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/words.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{start}}}}"
doc_to_choice: "{{{{ends}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""
SCORES = """\
import json, sys
folder, tasks, way = sys.argv[1:]
alone = way == "alone"
if alone:
    sys.modules["hf_qknorm"] = None  # before anything that could import it
else:
    import hf_qknorm
import lm_eval
import lm_eval.tasks
from transformers import pipeline

generate = pipeline("text-generation", model=folder, device="cpu", trust_remote_code=alone)
assert type(generate.model).__module__.startswith("transformers_modules" if alone else "hf_qknorm")
text = generate("ab", max_new_tokens=8, do_sample=False)
manager = lm_eval.tasks.TaskManager(include_path=tasks)
found = lm_eval.simple_evaluate(
    model="hf", model_args={"pretrained": folder, "trust_remote_code": alone}, tasks=["letters", "words"],
    task_manager=manager, device="cpu", batch_size=4,
)
print(json.dumps({"text": text[0]["generated_text"], "results": found["results"]}, default=str))
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Two tasks on local text: a perplexity, and a choice between two ends of a line."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if len(line) > 30][:16]
    rows = [{"text": line} for line in lines[:8]]
    (folder / "letters.jsonl").write_text("\n".join(map(json.dumps, rows)))
    choices = [{"start": line[:20], "ends": [line[20:], line[:19:-1]]} for line in lines]
    (folder / "words.jsonl").write_text("\n".join(map(json.dumps, choices)))
    for name, text in (("letters", LETTERS), ("words", WORDS)):
        (folder / f"{name}.yaml").write_text(text.format(folder=folder))
    return folder


@pytest.mark.slow
def test_the_scores_are_those_of_the_package(tmp_path, tasks):
    model = tiny_model("llama", vocab_size=300, max_position_embeddings=256)
    save_with_tokenizer(randomise(model), tmp_path / "source")
    folder = tmp_path / "converted"
    convert_checkpoint(tmp_path / "source", folder, "qk_norm_cap")
    ways = ("alone", "with the package")
    alone, own = (json.loads(child(SCORES, folder, tasks, x, home=tmp_path / "home").splitlines()[-1]) for x in ways)
    assert alone["text"] == own["text"]
    assert own["text"].startswith("ab")
    (perplexity, accuracy), expected = (
        (found["results"]["letters"]["byte_perplexity,none"], found["results"]["words"]["acc,none"])
        for found in (alone, own)
    )
    assert perplexity == pytest.approx(expected[0], rel=1e-5)
    assert perplexity > 10
    assert accuracy == expected[1]
