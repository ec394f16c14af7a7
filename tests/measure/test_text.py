"""Sources of text, and the batches of tokens made from it."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import LlamaConfig

from hf_qknorm.measure.text import as_batches, check_batches, check_text, load_text, tokenize
from hf_qknorm.small_model import byte_tokenizer


def test_text_from_a_file_and_from_a_folder(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\x00")
    assert load_text(str(tmp_path / "b.txt")) == "second"
    assert load_text(str(tmp_path)) == "first\nsecond"
    assert load_text(str(tmp_path), limit=3) == "fir"


def test_sources_without_text_are_refused(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"no such file or folder: .*missing\.txt"):
        load_text(str(tmp_path / "missing.txt"))
    with pytest.raises(ValueError, match="no text in it"):
        load_text(str(tmp_path))
    with pytest.raises(ValueError, match=r"^'To be or not.* names no file, folder or dataset: give text in a list"):
        load_text("To be or not to be. " * 99)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        load_text("owner/corpus")


def test_an_empty_source_is_refused(tmp_path, monkeypatch):
    (tmp_path / "notes.md").write_text("of the working directory")
    monkeypatch.chdir(tmp_path)
    for read in (load_text, check_text):
        with pytest.raises(ValueError, match="the text's source is empty, which would mean the working directory"):
            read("")
    assert load_text(".") == "of the working directory"


@pytest.mark.parametrize(("text", "encoding"), [("Größe, Maß und Füße. ", "latin-1"), ("Да и нет. ", "cp1251")])
def test_a_text_in_another_encoding_is_refused(text, encoding, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes((text * 100).encode(encoding))
    for source in (path, tmp_path):
        with pytest.raises(ValueError, match=rf"{path} is no text in UTF-8: of its first .* can't be read. Convert it"):
            load_text(str(source))
    with pytest.raises(ValueError, match=f"{path} is no text in UTF-8"):
        check_text(str(path))


@pytest.mark.parametrize(
    "data", ["Füße 🙂".encode()[:-1], "🙂 Füße".encode()[1:], b"a few \xff\xff bad bytes. " * 4 + b"x" * 900]
)
def test_a_few_bytes_that_are_not_utf_8_are_replaced(data, tmp_path):
    (tmp_path / "a.txt").write_bytes(data)
    assert load_text(str(tmp_path / "a.txt")) == data.decode(errors="replace")


def test_text_from_a_dataset_by_name(monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = [{"id": 1, "text": "one"}, {"id": 2, "text": "two"}, {"id": 3, "text": "three"}]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split, streaming: iter(rows))
    assert load_text("owner/corpus", limit=6) == "one\ntw"
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split, streaming: iter([{"id": 1}]))
    with pytest.raises(ValueError, match="'owner/corpus' is .*: a row has no column of text, only id"):
        load_text("owner/corpus")


@pytest.mark.parametrize("error", [ConnectionError("Couldn't reach it"), ValueError("Config name is missing")])
def test_a_dataset_that_can_not_be_read_is_named(monkeypatch, error):
    def load_dataset(name: str, **options: object) -> None:
        raise error

    monkeypatch.setattr(pytest.importorskip("datasets"), "load_dataset", load_dataset)
    message = f"'corpus' is no file or folder here, and no readable dataset on the Hub: {error}"
    with pytest.raises(ValueError, match=f"^{message}$"):
        load_text("corpus")


def test_byte_tokenizer_round_trip(tmp_path):
    tokenizer = byte_tokenizer()
    text = "Ünïcode, tabs\t and\n newlines 🙂"
    ids = tokenize(tokenizer, text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    tokenizer.save_pretrained(tmp_path)
    assert type(tokenizer).from_pretrained(tmp_path).decode(ids) == text


A, B = tokenize(byte_tokenizer(), "ab").tolist()


def batches_of(data, max_tokens=100):
    return list(as_batches(data, byte_tokenizer, batch=2, length=16, max_tokens=max_tokens))


def test_texts_are_joined_and_cut():
    batches = batches_of(["a" * 60, "b" * 60])
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(2, 16), (2, 16), (2, 16)]
    assert batches[-1]["input_ids"][-1].tolist() == [B] * 16
    assert [tuple(batch["input_ids"].shape) for batch in batches_of(["short"])] == [(1, 5)]


def test_files_folders_and_paths(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 60)
    expected = batches_of(["a" * 60])
    for source in (tmp_path, tmp_path / "a.txt", str(tmp_path)):
        for batch, other in zip(batches_of(source), expected, strict=True):
            assert torch.equal(batch["input_ids"], other["input_ids"])
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        batches_of(tmp_path / "b.txt")


def test_datasets_by_text_and_by_tokens():
    datasets = pytest.importorskip("datasets")
    text = datasets.Dataset.from_dict({"id": [1, 2], "text": ["a" * 60, "b" * 60]})
    tokens = datasets.Dataset.from_dict({"input_ids": [[A] * 60, [B] * 60]})
    expected = batches_of(["a" * 60, "b" * 60])
    for data in (text, tokens, text.to_iterable_dataset(), tokens.with_format("torch")):
        for batch, other in zip(batches_of(data), expected, strict=True):
            assert torch.equal(batch["input_ids"], other["input_ids"])


def test_batches_are_kept():
    given = [{"input_ids": torch.ones(2, 8, dtype=torch.long), "attention_mask": torch.ones(2, 8), "labels": 1}] * 5
    batches = batches_of(given, max_tokens=40)
    assert len(batches) == 3
    assert set(batches[0]) == {"input_ids", "attention_mask"}
    assert [batch["input_ids"].shape for batch in batches_of([torch.ones(3, 4), torch.ones(1, 9)])] == [(3, 4), (1, 9)]
    assert batches_of([{"input_ids": [[1, 2], [3, 4]]}])[0]["input_ids"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "calibration data is empty"),
        ([3], "expected strings, rows with a text or input_ids, or batches .* got int"),
        ([{"id": 3}], "a row has no column of text, only id"),
        ([torch.ones(2, 2), "text"], "a batch must be a tensor .* got str"),
    ],
)
def test_unusable_data_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        batches_of(data)


def test_a_stream_is_read_no_further_than_needed():
    def texts():
        yield "a" * 200
        raise AssertionError("read too far")

    assert len(batches_of(texts())) == 3
    assert len(batches_of((torch.ones(2, 25) for _ in texts()), max_tokens=50)) == 1


def test_a_tokenizer_that_fails_is_named():
    class Failing:
        name_or_path = "there"

        def __call__(self, text, verbose):
            raise KeyError("no such piece")

    with pytest.raises(ValueError, match="there: the tokenizer can't read the text .*no such piece"):
        tokenize(Failing(), "text")


def test_a_tokenizer_that_returns_no_tokens_is_named():
    def nothing(text, verbose):
        return {"input_ids": []}

    with pytest.raises(ValueError, match="function: the tokenizer gives no tokens for 4 characters"):
        tokenize(nothing, "text")


def test_a_mapping_is_one_batch():
    ids = torch.arange(4)[None]
    (batch,) = batches_of({"input_ids": ids, "attention_mask": None, "more": ids})
    assert list(batch) == ["input_ids"]
    assert batch["input_ids"] is ids
    assert batches_of({"text": "ab"})[0]["input_ids"].tolist() == [[A, B]]
    with pytest.raises(ValueError, match="is a mapping of train, test: give a value of it"):
        batches_of({"train": ["text"], "test": ["text"]})


def test_the_padding_and_the_emptiness_of_rows_are_left_out():
    rows = [{"input_ids": []}, {"input_ids": [A, B, 0, 0], "attention_mask": [1, 1, 0, 0]}, {"input_ids": [B]}]
    (batch,) = batches_of(rows)
    assert batch["input_ids"].tolist() == [[A, B, B]]


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"max_tokens": -5}])
def test_sizes_below_one_are_refused(wrong):
    with pytest.raises(ValueError, match="expected at least 1"):
        next(as_batches(["text"], byte_tokenizer, **{"batch": 2, "length": 16, "max_tokens": 100, **wrong}))


@pytest.mark.parametrize("token", [-1, 64])
def test_tokens_outside_of_the_vocabulary_are_refused(token):
    batch = {"input_ids": torch.tensor([[*range(20), token]])}
    with pytest.raises(ValueError, match=f"the text holds the token {token}, and the model has 64, from 0 on"):
        check_batches([batch], LlamaConfig(vocab_size=64))
