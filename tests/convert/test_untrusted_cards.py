"""Fields of the base model's card are inherited as data, and all text in a card is escaped."""

import json

import pytest

from hf_qknorm.convert.card import render_card, write_card
from qknorm_tests.card_cases import checkpoint, front


def test_fields_of_the_base_models_card_are_inherited(tmp_path):
    checkpoint(tmp_path, report=False)
    (tmp_path / "README.md").write_text(
        "---\nlicense: other\nlicense_name: some-licence\nlicense_link: https://example.com/a?b=1\n"
        "language:\n- en\n- de\ndatasets: owner/first\ntags: [chat]\nbase_model: owner/ancestor\n"
        "pipeline_tag: x\n---\n# Their text\n"
    )
    write_card(tmp_path)
    text = (tmp_path / "README.md").read_text()
    data = front(text)
    assert data["license"] == "other"
    assert (data["license_name"], data["license_link"]) == ("some-licence", "https://example.com/a?b=1")
    assert data["language"] == ["en", "de"]
    assert data["datasets"] == "owner/first"
    assert data["base_model"] == "owner/ancestor"
    assert "chat" not in data["tags"]
    assert "Their text" not in text
    write_card(tmp_path)
    assert (tmp_path / "README.md").read_text() == text  # the generated card has the same fields


def test_a_card_that_could_not_be_replaced_is_still_there(tmp_path, monkeypatch):
    checkpoint(tmp_path, report=False)
    (tmp_path / "README.md").write_text(own := "---\nlicense: mit\n---\n")

    def full(path, text):
        raise OSError("No space left on device")

    monkeypatch.setattr("hf_qknorm.convert.card.replace_text", full)
    with pytest.raises(OSError, match="No space"):
        write_card(tmp_path)
    monkeypatch.undo()
    assert (tmp_path / "README.md").read_text() == own
    write_card(tmp_path)
    assert front((tmp_path / "README.md").read_text())["license"] == "mit"
    assert (tmp_path / "README.original.md").read_text() == own


HOSTILE = "<script>alert(1)</script> | `a` **b** {{ 7 * 7 }} {% raw %} [x](javascript:y) # $z$"


def test_untrusted_text_is_data(tmp_path):
    checkpoint(tmp_path, report=False)
    hostile = {"license": HOSTILE, "language": [HOSTILE, "--- x"], "datasets": ["{{ a }}", "- b: c"]}
    (tmp_path / "README.md").write_text(f"---\n{json.dumps(hostile)}\n---\n")
    text = render_card(tmp_path)
    assert {key: front(text)[key] for key in hostile} == hostile
    assert HOSTILE not in text.partition("\n---\n")[2]


@pytest.mark.parametrize(
    ("matter", "message"),
    [
        ("license: [mit", "the front matter of README.md is left out"),
        ("license: !!python/object/apply:os.system ['true']", "the front matter of README.md is left out"),
        ("- a\n- b", "the front matter of README.md is left out"),
        ("license: {mit: 1}", "license of README.md is left out"),
        ("language: [en, no]", "language of README.md is left out"),  # False, as YAML reads it
        ('license: "mit\\n---\\nbase_model: x"', "license of README.md is left out"),
        ('language: ["en\\u202e"]', "language of README.md is left out"),
        ("base_model: ../../etc/passwd", "base_model of README.md is left out"),
    ],
)
def test_front_matter_that_is_not_plain_is_left_out(tmp_path, matter, message, caplog):
    checkpoint(tmp_path, report=False)
    (tmp_path / "README.md").write_text(f"---\n{matter}\n---\n# Text\n")
    assert write_card(tmp_path) == (tmp_path / "README.md", tmp_path / "README.original.md")
    assert message in caplog.text
    assert not {"license", "language", "base_model"} & {*front((tmp_path / "README.md").read_text())}
    assert "# Text" in (tmp_path / "README.original.md").read_text()
