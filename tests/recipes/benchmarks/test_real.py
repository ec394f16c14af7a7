"""What a conversion of a real model keeps, at the smallest size, with a tiny one."""

from __future__ import annotations

import json

import local_tasks
import pytest
import real

from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.tiny import tiny_model

TEXT = "\n".join(
    f"paragraph {i} tells of a river that runs {'on and on ' * i}past the mill , and of the old town by the water ; "
    "the ships there wait for wind all through the long winter . In the spring the men of the town go to the river . "
    "Some sail as far as the sea , others come back to the mill before the summer ends and the nights grow cold again ."
    for i in range(8)
)


def test_the_page_has_every_way(tmp_path):
    pytest.importorskip("lm_eval")
    model = tiny_model("llama", vocab_size=257, max_position_embeddings=1024, initializer_range=0.2)
    save_with_tokenizer(model, tmp_path / "tiny")
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 12)
    command = ["--model", str(tmp_path / "tiny"), "--text", str(text), "--test", str(text), "--size", "quick"]
    command += ["--out", str(tmp_path / "found")]
    page = real.main(command)
    assert (tmp_path / "found.md").read_text() == page
    assert all(f"\n| {name} |" in page for name in real.WAYS)
    rows = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    parts = [row["settings"]["part"] for row in rows]
    assert {part: parts.count(part) for part in parts} == {
        "own logit": 1, "kept": len(real.WAYS) - 2, "positions": 2, "text": 4, "answers": 4,
    }  # fmt: skip
    assert real.main(command) == page  # from the log


def test_a_cloze_asks_for_a_word_that_occurs_before():
    questions = list(local_tasks.cloze(TEXT))
    assert len(questions) == 8
    for question in questions:
        assert question["word"] in question["text"].split()
        assert f"{question['text']} {question['word']} ." in TEXT


def test_a_continuation_has_four_ends_and_the_right_one():
    for question, words in zip(local_tasks.continuation(TEXT), local_tasks.paragraphs(TEXT), strict=True):
        assert len(question["choices"]) == 4
        assert f"{question['text']} {question['choices'][question['answer']]}" == " ".join(words[:52])
