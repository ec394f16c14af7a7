"""Untrusted configs, reports and weights are read as data, never as code, and bad ones raise a clear ValueError."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hf_qknorm import Calibration, Scheme
from hf_qknorm.checkpoint.safetensors_files import INDEX, SINGLE, Weights
from hf_qknorm.files.untrusted import DEPTH, is_shallow, read_json
from hf_qknorm.hub.metadata import inherited_fields, is_generated_card
from hf_qknorm.model.derived import derived_config
from qknorm_tests.hostile import REPORT, nested, outcome, variants

FUZZ = settings(
    max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


NUMBERS = st.one_of(
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, -(10**400), 2**63, 0]),
    st.floats(),
    st.sampled_from([1e308]),
)
SCALARS = st.one_of(
    st.none(), NUMBERS, st.text(max_size=8), st.sampled_from(["auto", "rms", "lp", "x" * 10**5, "\n---\n", "{{ x }}"])
)
JSON = st.one_of(
    SCALARS,
    st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner)),
    st.sampled_from([5, 2000]).map(nested),
    st.just(10**4).map(lambda count: {str(i): [i] for i in range(count)}),
)


def like(made: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return `made` with arbitrary values at a few keys, some of them unknown or missing."""
    changes = st.dictionaries(st.sampled_from([*made, "unknown"]), JSON, max_size=3)
    missing = st.sets(st.sampled_from([*made]), max_size=1)
    return st.builds(lambda new, gone: {k: v for k, v in (made | new).items() if k not in gone}, changes, missing)


SCHEME = Scheme(q="rms", k="lp", p=3.0, softcap=50.0, knee=4.0).to_dict()


def test_each_part_of_schemes_and_reports():
    for data in variants(SCHEME):
        outcome(lambda data=data: Scheme.from_dict(data))
    assert Calibration.from_dict(REPORT.to_dict()) == REPORT
    for data in variants(REPORT.to_dict()):
        report = outcome(lambda data=data: Calibration.from_dict(data))
        assert report is None or report.table()


@FUZZ
@given(st.one_of(JSON, like(SCHEME)))
def test_schemes(data):
    for read in (Scheme.from_dict, Scheme.of):
        scheme = outcome(lambda read=read: read(data))
        if scheme is not None:
            assert Scheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme
            assert len(str(scheme)) < 300


@FUZZ
@given(st.one_of(JSON, like(REPORT.to_dict())))
def test_reports(data):
    report = outcome(lambda: Calibration.from_dict(data))
    if report is not None:
        again = Calibration.from_dict(json.loads(json.dumps(report.to_dict())))
        assert again.to_dict().keys() == report.to_dict().keys()
        assert report.table()
        assert str(report)


KEYS = {
    "qk_norm": st.one_of(JSON, like(SCHEME)),
    "qk_norm_base": st.one_of(JSON, like({"attn_logit_softcapping": 50.0})),
    "qk_norm_blend": st.one_of(JSON, like({"norms": True, "softcap": 30.0})),
    "attn_logit_softcapping": JSON,
}


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_each_part_of_configs(model_type):
    made: dict[str, Any] = {"qk_norm": {"q": "rms", "softcap": 30.0}, "attn_logit_softcapping": 30.0}
    made |= {"qk_norm_base": {"attn_logit_softcapping": 50.0}, "qk_norm_blend": {"norms": True, "softcap": 30.0}}
    assert derived_config(model_type)(**made).scheme.softcap == 30
    for keys in variants(made):
        if isinstance(keys, dict) and (model_type == "llama" or type(keys.get("attn_logit_softcapping", 1.0)) is float):
            outcome(lambda keys=keys: derived_config(model_type)(**keys))


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
@FUZZ
@given(st.fixed_dictionaries({}, optional=KEYS))
def test_configs(model_type, keys):
    cap = keys.get("attn_logit_softcapping")
    assume(model_type == "llama" or cap is None or type(cap) is float)  # Gemma's own field, which transformers checks
    config = outcome(lambda: derived_config(model_type)(**keys))
    if config is not None and config.qk_norm is not None:
        assert config.scheme == Scheme.from_dict(config.qk_norm)
        assert derived_config(model_type).from_dict(json.loads(config.to_json_string())).scheme == config.scheme


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def test_each_part_of_headers_and_indices(tmp_path):
    for header in filter(is_shallow, variants({"weight": ENTRY, "__metadata__": {"format": "pt"}})):
        text = json.dumps(header).encode()
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 16)
        outcome(lambda: Weights(tmp_path).parameters)
    shard = (tmp_path / SINGLE).rename(tmp_path / "shard.safetensors").name  # a single file would be read instead
    for index in filter(is_shallow, variants({"metadata": {"total_size": 1}, "weight_map": {"weight": shard}})):
        (tmp_path / INDEX).write_text(json.dumps(index))
        with suppress(FileNotFoundError):
            outcome(lambda: Weights(tmp_path))


@FUZZ
@given(st.one_of(JSON, like({"weight": ENTRY, "__metadata__": {"format": "pt"}}), st.builds(dict, weight=like(ENTRY))))
def test_safetensors_headers(tmp_path, header):
    text = json.dumps(header).encode() if is_shallow(header) else b"[" * 5000
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 16)
    weights = outcome(lambda: Weights(tmp_path))
    if weights is not None:
        assert weights.parameters >= 0
        assert weights.nbytes <= 16


@FUZZ
@given(
    st.one_of(
        JSON,
        like({"metadata": {"total_size": 1}, "weight_map": {"weight": "a.safetensors"}}),
        st.builds(
            lambda file: {"weight_map": {"weight": file}}, st.one_of(JSON, st.text().map(lambda x: x + ".safetensors"))
        ),
    )
)
def test_indices(tmp_path, index):
    text = json.dumps(index) if is_shallow(index) else "[" * 5000
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with suppress(FileNotFoundError):  # a file that the index names must exist
        outcome(lambda: Weights(tmp_path))


def test_metadata_of_an_index_is_a_mapping(tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"metadata": [], "weight_map": {"weight": SINGLE}}))
    with pytest.raises(ValueError, match='"metadata" is .*, expected a mapping'):
        Weights(tmp_path)


OUTSIDE = ("../x", "/etc/x", "a/b", "..\\x", "C:x", "x\0", "\n", "x" * 300, "")


@pytest.mark.parametrize("name", [*(f"{name}.safetensors" for name in OUTSIDE), "x.bin"])
def test_an_index_names_only_files_of_its_folder(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(ValueError, match=r"expected a \.safetensors file of this folder"):
        Weights(tmp_path)


@FUZZ
@given(
    st.one_of(
        JSON.filter(is_shallow).map(json.dumps),
        st.text(),
        st.sampled_from(["[" * 900, "- " * 900, "a: " * 500, "? " * 900]),
    )
)
def test_front_matter(tmp_path, matter):
    (tmp_path / "README.md").write_text(f"---\n{matter}\n---\n", encoding="utf-8", errors="replace")
    outcome(lambda: inherited_fields(tmp_path / "README.md"))
    assert is_generated_card(tmp_path / "README.md") in (False, True)


def test_depth_is_limited(tmp_path):
    assert is_shallow(nested(DEPTH - 1))
    assert not is_shallow(nested(DEPTH))
    (tmp_path / "x.json").write_text(json.dumps(nested(DEPTH)))
    with pytest.raises(ValueError, match="x.json is nested too deeply"):
        read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_text('{"a": 1}   ')
    with pytest.raises(ValueError, match="x.json is larger than 10 bytes"):
        read_json(tmp_path / "x.json", 10)
