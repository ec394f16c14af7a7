"""Model cards state what was measured, and nothing else. The base model's fields are data, and all text is escaped."""

import ast
import json
import math
import re
from pathlib import Path

import pytest
import torch

from hf_qknorm import SCHEMES, Scheme, calibrate, patch_model
from hf_qknorm.convert.card import render_card, write_card
from hf_qknorm.files.names import PLOT
from hf_qknorm.reports.records import Prediction
from qknorm_tests.card_cases import REPORT, checkpoint, edit, front
from qknorm_tests.covering import covering
from qknorm_tests.folders import save_with_tokenizer
from qknorm_tests.tiny import tiny_model


@pytest.mark.parametrize(
    ("scheme", "family", "report"), covering([*SCHEMES][1:], ["llama", "gpt2", "gemma2"], [True, False], strength=1)
)
def test_every_scheme_has_a_card(tmp_path, scheme, family, report):
    text = render_card(checkpoint(tmp_path, scheme, family, report))
    data = front(text)
    assert data["library_name"] == "transformers"
    assert data["pipeline_tag"] == "text-generation"
    assert {"hf_qknorm", family} <= set(data["tags"])
    assert ("model-index" in data) is report
    assert (PLOT in text) is report
    assert ("This model has no measurement" in text) is not report
    assert ("|---" in text) is report
    prose = text.partition("\n---\n")[2]
    assert not re.search(r"\{\{|\{%|None|Undefined|\bnan\b", prose)
    assert not re.search(r"\n{3}| \n|  +[a-z]", prose)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        ast.parse(block)
    for part in ("## Use", "## Changes", "## Measurement", "## Limits"):
        assert part in text
    resolved = SCHEMES[scheme].resolve()
    assert ("RMSNorm" in text) is ("rms" in resolved.norms)
    assert ("LayerNorm" in text) is ("layer" in resolved.norms)
    assert ("50·tanh(x/50)" in text) is (resolved.softcap == 50)
    assert ("2010.04245" in text) is (scheme in ("henry", "lp"))
    assert ("2602.05006" in text) is (scheme == "lp")
    assert ("2505.09388" in text) is (resolved.q == resolved.k == "rms")
    assert "2606.16310" not in text


def test_a_card_tells_how_the_heads_of_latent_attention_are_normed(tmp_path):
    text = render_card(checkpoint(tmp_path, "qk_norm", "youtu"))
    assert "The channels with and without rotary embedding are normalised separately" in text
    assert "before the KV cache" not in text
    assert "2606.16310" in text
    assert "2505.09388" not in text


def test_the_card_of_a_model_without_a_head(tmp_path):
    model = patch_model(tiny_model("llama").base_model, "qk_norm")
    calibrate(model, [torch.randint(3, 64, (2, 20))], knee=0).save(tmp_path / REPORT)
    model.save_pretrained(tmp_path)
    text = render_card(tmp_path)
    assert front(text)["pipeline_tag"] == "feature-extraction"
    assert "model-index" not in front(text)
    assert "AutoModel.from_pretrained" in text
    assert PLOT in text
    assert "hf-qknorm export" not in text


def test_names_on_the_hub_are_linked_and_paths_left_out(tmp_path):
    checkpoint(tmp_path)
    text = render_card(tmp_path)
    assert "base_model" not in front(text)
    edit(tmp_path, base_model="owner/some_llama")
    text = render_card(tmp_path, repo_id="me/converted")
    data = front(text)
    assert (data["base_model"], data["base_model_relation"]) == ("owner/some_llama", "finetune")
    assert data["model-index"][0]["name"] == "converted"
    assert "[owner/some_llama](https://huggingface.co/owner/some_llama)" in text
    assert 'from_pretrained("me/converted")' in text
    assert "OWNER/NAME" not in text
    for private in (str(tmp_path), tmp_path.name, str(Path.home())):
        assert private not in text


def test_the_first_snippet_runs(tmp_path, capsys):
    save_with_tokenizer(patch_model(tiny_model("llama", vocab_size=300), "qk_norm"), tmp_path)
    block = re.search(r"```python\n(.*?)```", render_card(tmp_path), re.DOTALL)[1]
    assert "tokenizer" in block
    exec(block.replace("OWNER/NAME", str(tmp_path)), {})
    assert "Once upon a time" in capsys.readouterr().out


def test_the_export_is_mentioned_if_there_is_one(tmp_path):
    for scheme, native in (("qk_norm", "qwen3"), ("soft_cap", None), ("qk_norm_cap", None)):
        text = render_card(checkpoint(tmp_path / scheme, scheme, report=False))
        assert (f"makes it a plain {native}, which computes the same" in text) is (native is not None)
        assert ("hf-qknorm export" in text) is (native is not None)


def test_folders_without_a_patched_checkpoint_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        write_card(tmp_path)
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a plain llama: convert it first"):
        write_card(tmp_path)
    with pytest.raises(ValueError, match="expected a name on the Hub"):
        write_card(checkpoint(tmp_path, report=False), repo_id='x") import os #')
    edit(checkpoint(tmp_path), scheme=Scheme(softcap=3.0))
    with pytest.raises(ValueError, match=f"{REPORT} has the scheme softcap=3.0"):
        write_card(tmp_path)
    (tmp_path / REPORT).write_text("{}")
    with pytest.raises(ValueError, match=f"{REPORT}: tokens: Field required"):
        write_card(tmp_path)
    assert not (tmp_path / "README.md").exists()


def test_a_card_warns_of_text_that_is_shorter_than_the_context(tmp_path):
    assert edit(checkpoint(tmp_path), context=2048).length == 20
    text = render_card(tmp_path)
    assert "tokens in sequences of up to 20" in text
    warning = "**Long context was not measured**: the text was in sequences of up to 20 tokens, and the model's context"
    assert f"{warning} has 2,048." in text
    edit(tmp_path, context=20)
    assert "Long context" not in render_card(tmp_path)


def test_a_card_has_the_numbers_of_the_report(tmp_path):
    checkpoint(tmp_path)
    edit(
        tmp_path,
        base=Prediction(1.476),
        ones=Prediction(2.41, 0.8, 0.6),
        chosen=Prediction(1.5312, 0.05, 0.925),
        tokens=262_144,
        judged=16_384,
    )
    text = render_card(tmp_path)
    results = front(text)["model-index"][0]["results"]
    assert [(m["name"], m["value"]) for m in results[0]["metrics"]] == [
        ("loss, converted", 1.5312),
        ("perplexity, converted", round(math.exp(1.5312), 4)),
        ("loss, unpatched", 1.476),
        ("perplexity, unpatched", round(math.exp(1.476), 4)),
    ]
    for line in (
        "| unpatched | 1.476 | 4.38 | 0.0000 | 100.0% |",
        "| fresh gains | 2.410 | 11.13 | 0.8000 | 60.0% |",
        "| this model | 1.531 | 4.62 | 0.0500 | 92.5% |",
        "its loss is **1.531** nats per token; that of the unpatched model is **1.476**",
        "is 0.055 nats per token above the unpatched model's, and for 7.5% of the tokens",
        "on 16,384 tokens of the calibration text",
        "Calibrated on 262,144 tokens",
    ):
        assert line in text


def test_a_card_has_knee_and_bound(tmp_path):
    checkpoint(tmp_path, Scheme(q="rms", k="lp", p=3.0, softcap=50.0), knee=4.0)
    report = edit(tmp_path, knee=4.0, knees={2.0: Prediction(1.5), 4.0: Prediction(1.482)})
    text = render_card(tmp_path)
    largest = [max(max(getattr(x, side).max_logit) for x in report.layers.values()) for side in ("before", "after")]
    for line in (
        "# Llama with QK norm (knee 4) and a logit cap",
        f"No input gives an attention logit over **{report.bound:.1f}** before the cap, up to rounding.",
        "have a **knee** of 4: their ε",
        "4 times the mean |x|ᵖ of calibration text",
        "; loss by knee: 2: 1.500; 4: 1.482.",
        f"The bound of {report.bound:.1f} holds for any input",
        f"before any cap is {largest[1]:.1f}, and {largest[0]:.1f} in the unpatched model.",
    ):
        assert line in text


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
