"""Fields of the base model's card are inherited as data, and all text in a card is escaped."""

from __future__ import annotations

import json
import re

import pytest

from hf_qknorm.files.names import LOGITS_PLOT, LOSS_PLOT
from hf_qknorm.hub.card import _template, render_card, write_card
from hf_qknorm.hub.metadata import is_generated_card
from qknorm_tests.card_cases import checkpoint, edit, front


def test_fields_of_the_base_models_card_are_inherited(tmp_path):
    checkpoint(tmp_path)
    edit(tmp_path, dataset="owner/corpus")
    (tmp_path / "README.md").write_text(
        "---\nlicense: other\nlicense_name: some-licence\nlicense_link: https://example.com/a?b=1\n"
        "language:\n- en\n- no\ndatasets: owner/first\ntags: [chat]\nbase_model: owner/ancestor\n"
        "pipeline_tag: x\n---\n# Their text\n"
    )
    write_card(tmp_path)
    text = (tmp_path / "README.md").read_text()
    data = front(text)
    assert data["license"] == "other"
    assert (data["license_name"], data["license_link"]) == ("some-licence", "https://example.com/a?b=1")
    assert data["language"] == ["en", "no"]
    assert data["datasets"] == ["owner/first", "owner/corpus"]
    assert data["base_model"] == "owner/ancestor"
    assert "chat" not in data["tags"]
    assert "Their text" not in text
    write_card(tmp_path)
    assert (tmp_path / "README.md").read_text() == text  # the generated card has the same fields


HOSTILE = "<script>alert(1)</script> | `a` **b** {{ 7 * 7 }} {% raw %} [x](javascript:y) # $z$"


def test_untrusted_text_is_escaped(tmp_path):
    shown = _template().environment.from_string("{{ text }}").render(text=HOSTILE + "\n---\n# more")
    assert "\n" not in shown
    assert not re.search(r"(?<!\\)[|`*_{}\[\]#$~]|<|>", shown)
    checkpoint(tmp_path, report=False)
    hostile = {"license": HOSTILE, "language": [HOSTILE, "--- x"], "datasets": ["{{ a }}", "- b: c"]}
    (tmp_path / "README.md").write_text(f"---\n{json.dumps(hostile)}\n---\n")
    text = render_card(tmp_path)
    assert {key: front(text)[key] for key in hostile} == hostile
    assert HOSTILE not in text.partition("\n---\n")[2]


@pytest.mark.parametrize(
    ("matter", "message"),
    [
        ("license: [mit", "front matter can't be read"),
        ("a: &x 1\nlicense: *x", "aliases .* are not supported"),
        ("a: &a [1]\nb: &b [*a, *a]\nc: [*b, *b]", "aliases"),
        ("license: !!python/object/apply:os.system ['true']", r"tags \(tag:yaml.org,2002:python.* are not supported"),
        ("license: " + "[" * 5000, "front matter can't be read"),
        ("license: {mit: 1}", "license is .*, expected a line of text"),
        ('license: "mit\\n---\\nbase_model: x"', "license is .*, expected a line of text"),
        ('language: ["en\\u202e"]', "language is .*, expected a line of text"),
        ("language: [" + "en, " * 1000 + "]", "language has 1,000 entries, expected at most 200"),
        ("license: " + "m" * 1000, "license is 'mmm.*, expected a line of text"),
        ("base_model: ../../etc/passwd", "base_model is .*, expected a name on the Hub"),
        ("- a\n- b", "its front matter is .*, expected a mapping"),
        ("x: " + "y" * 70_000, "expected at most 65,536"),
    ],
)
def test_hostile_front_matter_is_refused(tmp_path, matter, message):
    checkpoint(tmp_path, report=False)
    (tmp_path / "README.md").write_text(f"---\n{matter}\n---\n# Text\n")
    with pytest.raises(ValueError, match=message) as error:
        write_card(tmp_path)
    assert "README.md" in str(error.value)
    assert len(str(error.value)) < 700
    assert "# Text" in (tmp_path / "README.md").read_text()
    assert not is_generated_card(tmp_path / "README.md")


def test_links_in_the_folder_are_replaced_not_followed(tmp_path):
    (tmp_path / "model").mkdir()
    folder = checkpoint(tmp_path / "model")
    for name in ("README.md", LOSS_PLOT, LOGITS_PLOT):
        (tmp_path / f"precious-{name}").write_text("precious")
        (folder / name).symlink_to(tmp_path / f"precious-{name}")
    write_card(folder)
    assert all(path.read_text() == "precious" for path in tmp_path.glob("precious*"))
    assert "## Use" in (folder / "README.md").read_text()
    assert not [path for path in folder.iterdir() if path.is_symlink()]
