"""Texts, paths and batches, as batches of a model's inputs."""

import numpy as np
import pytest
import torch

from hf_qknorm.measure.text import as_batches, check_text, load_text, tokenize
from hf_qknorm.small_model import byte_tokenizer
from qknorm_tests.tiny import tiny_model


def test_text_from_a_file_and_from_a_folder(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\x00")
    assert load_text(str(tmp_path / "b.txt")) == "second"
    assert load_text(tmp_path) == "first\nsecond"
    assert load_text(str(tmp_path), limit=3) == "fir"


def test_sources_without_text_are_refused(tmp_path, monkeypatch):
    for read in (load_text, check_text):
        with pytest.raises(FileNotFoundError, match=r"no such file or folder: .*missing\.txt"):
            read(str(tmp_path / "missing.txt"))
        with pytest.raises(ValueError, match="no text in it .in a folder, .txt"):
            read(str(tmp_path))
        with pytest.raises(ValueError, match="is a pipe or a device, which can't be read twice"):
            read("/dev/null")
    (tmp_path / "notes.md").write_text("of the working directory")
    monkeypatch.chdir(tmp_path)
    for read in (load_text, check_text):
        with pytest.raises(ValueError, match="the text's source is empty, which would mean the working directory"):
            read("")
    assert load_text(".") == "of the working directory"


def test_a_text_may_begin_with_empty_lines(tmp_path):
    (tmp_path / "a").write_text("\n" * 2000 + "text")
    check_text(str(tmp_path / "a"))
    (tmp_path / "a").write_text("\n" * 2000)
    with pytest.raises(ValueError, match="a: no text in it"):
        check_text(str(tmp_path / "a"))


@pytest.mark.parametrize(("text", "encoding"), [("Größe, Maß und Füße. ", "latin-1"), ("Да и нет. ", "cp1251")])
def test_a_text_in_another_encoding_is_refused(text, encoding, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes((text * 100).encode(encoding))
    for read, source in ((load_text, path), (load_text, tmp_path), (check_text, path)):
        with pytest.raises(ValueError, match=rf"{path} is no text in UTF-8: of its first .* can't be read. Convert it"):
            read(source)


@pytest.mark.parametrize(
    "data", ["Füße 🙂".encode()[:-1], "🙂 Füße".encode()[1:], b"a few \xff\xff bad bytes. " * 4 + b"x" * 900]
)
def test_a_few_bytes_that_are_not_utf_8_are_replaced(data, tmp_path):
    (tmp_path / "a.txt").write_bytes(data)
    assert load_text(str(tmp_path / "a.txt")) == data.decode(errors="replace")


def test_byte_tokenizer_round_trip():
    tokenizer, text = byte_tokenizer(), "Ünïcode, tabs\t and\n newlines 🙂"
    ids = tokenize(tokenizer, text)
    assert (len(ids), tokenizer.decode(ids)) == (len(text.encode()), text)


A, B = tokenize(byte_tokenizer(), "ab").tolist()
LLAMA, BERT = tiny_model("llama"), tiny_model("bert")


def batches_of(data, max_tokens=100, model=LLAMA):
    return as_batches(model, data, byte_tokenizer(), batch=2, length=16, max_tokens=max_tokens)


def shapes(batches) -> list[tuple[int, ...]]:
    return [tuple(batch["input_ids"].shape) for batch in batches]


def test_texts_are_joined_and_cut(tmp_path):
    batches = batches_of(["a" * 60, "b" * 60])
    assert shapes(batches) == [(2, 16), (2, 16), (2, 16)]
    assert batches[-1]["input_ids"][-1].tolist() == [B] * 16
    assert shapes(batches_of(["short"])) == [(1, 5)]
    (tmp_path / "a.txt").write_text("a b" * 20)
    for source in (tmp_path, tmp_path / "a.txt", str(tmp_path), ["a b" * 20], "a b" * 20):
        for batch, other in zip(batches_of(source), batches_of(["a b" * 20]), strict=True):
            assert torch.equal(batch["input_ids"], other["input_ids"])


@pytest.mark.parametrize("path", ["b.txt", "some folder/b.txt", "owner/corpus"])
def test_a_string_that_looks_like_a_path_is_no_text(path):
    with pytest.raises(FileNotFoundError, match=f"no such file or folder: {path}"):
        batches_of(path)


def test_a_long_text_without_spaces_is_text():
    (batch,) = batches_of("あ" * 5000, max_tokens=16)
    assert batch["input_ids"].numel() > 0
    with pytest.raises(FileNotFoundError, match="no such file or folder: あ{200}$"):
        batches_of("あ" * 1000)


def test_tensors_that_the_model_takes_are_kept_in_batches_as_they_are():
    ids = torch.ones(2, 8, dtype=torch.long)
    given = {"input_ids": ids, "position_ids": ids[:1], "labels": ids, "token_type_ids": ids, "seq_idx": ids}
    given |= {"attention_mask": None, "id": torch.arange(2), "text": ["a", "b"], "num_items_in_batch": torch.tensor(9)}
    (batch,) = batches_of([given])
    assert set(batch) == {"input_ids", "position_ids", "labels", "seq_idx"}  # the last, as of every model's arguments
    assert all(batch[name] is given[name] for name in batch)
    assert set(batches_of([given], model=BERT)[0]) == {*batch, "token_type_ids"}
    assert shapes(batches_of([torch.ones(3, 4), torch.ones(1, 9)])) == [(3, 4), (1, 9)]
    data = pytest.importorskip("datasets").Dataset.from_list([{"input_ids": [A] * 4}] * 3).with_format("torch")
    assert shapes(batches_of(torch.utils.data.DataLoader(data, batch_size=2))) == [(2, 4), (1, 4)]


@pytest.mark.parametrize("base", [type(LLAMA), torch.nn.Module])
def test_a_class_that_passes_its_arguments_on_takes_what_its_model_takes(base):
    class Around(base):
        def forward(self, *args, **kwargs): ...

    given = dict.fromkeys(("input_ids", "attention_mask", "position_ids"), torch.ones(2, 8, dtype=torch.long))
    assert set(batches_of([given], model=Around.__new__(Around))[0]) == {*given}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the data is empty: expected texts"),
        (3, "the data is of type int: expected texts"),
        ([3], "got int: expected texts"),
        ([{"id": 3, "text": "a"}], r'got a mapping of id int, text str: .* give the column, data\["text"\]'),
        ([{"input_ids": [1, 2]}], r"got a mapping of input_ids list: .* make batches in a DataLoader"),
        ([{"input_ids": torch.ones(2, 9), "attention_mask": torch.ones(3, 9)}], r"mask \[3, 9\]: expected texts"),
        ([{"input_ids": torch.ones(1, 9), "attention_mask": torch.ones(9)}], r"mask \[9\]: expected texts"),
        ([{"input_ids": torch.ones(1, 9), "attention_mask": [[1] * 9]}], "attention_mask of type list, expected a te"),
        ([{"input_ids": torch.ones(1, 9), "labels": np.ones((1, 9))}], "labels of type ndarray, expected a tensor"),
        ([{"input_ids": torch.ones(9)}], r"got a mapping of input_ids \[9\]: expected texts"),
        ([torch.ones(2, 9), torch.ones(0, 9)], r"a batch is empty \(input_ids \[0, 9\]\)"),
        ([{"pixel_values": torch.ones(0, 3, 8, 8)}], r"a batch is empty \(pixel_values \[0, 3, 8, 8\]\)"),
        ([{"input_ids": torch.ones(2, 9), "pixel_values": torch.ones(2, 3, 8, 8)}], "takes no images: give text alone"),
        ([__file__, __file__], r"the data is a list of paths \('.*'\): give one path, of a file or folder"),
        ({"input_ids": torch.ones(2, 2)}, "the data is of type dict: expected texts"),
        (torch.ones(2, 2), "the data is of type Tensor: expected texts"),
        ([torch.ones(2, 2), "text"], "got str: expected texts"),
        (["text", torch.ones(2, 2)], "an item is of type Tensor behind a text: expected texts"),
    ],
)
def test_unusable_data_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        batches_of(data)


def test_a_stream_is_read_no_further_than_needed_and_padding_does_not_count():
    def texts():
        yield "a" * 200
        raise AssertionError("read too far")

    assert len(batches_of(texts())) == 3
    assert len(batches_of((torch.ones(2, 25) for _ in texts()), max_tokens=50)) == 1
    half = {"input_ids": torch.ones(2, 8), "attention_mask": torch.arange(8).expand(2, 8) < 4}
    assert len(batches_of([half] * 9, max_tokens=40)) == 5


@pytest.mark.parametrize("fails", [True, False])
def test_a_tokenizer_that_fails_or_returns_no_tokens_is_named(fails):
    class Broken:
        name_or_path = "there"

        def __call__(self, text, verbose):
            if fails:
                raise KeyError("no such piece")
            return {"input_ids": []}

    reason = "fails .*no such piece" if fails else "gives no tokens for 4 characters"
    with pytest.raises(ValueError, match=f"there: the tokenizer {reason}"):
        tokenize(Broken(), "text")


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"max_tokens": -5}, {"batch": 1.5}])
def test_sizes_below_one_are_refused(wrong):
    with pytest.raises(ValueError, match="expected at least 1"):
        as_batches(LLAMA, ["text"], byte_tokenizer(), **{"batch": 2, "length": 16, "max_tokens": 100, **wrong})
