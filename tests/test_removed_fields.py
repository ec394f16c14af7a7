"""Fields that a scheme had up to version 0.2: without effect they are passed over, in use they are refused by name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_qknorm import SCHEMES, Scheme, cli, patch_model
from hf_qknorm.scheme import REMOVED, STORED
from qknorm_tests.folders import edit_config, loaded, logits, save
from qknorm_tests.tables import randomise, sharp_model

IN_USE = {"temperature": "learned", "sinks": "learned", "length_scale": 256, "width": "all"}
NEW = Scheme(q="rms", k="rms", softcap=5.0, knee=2.0, sharpness=4)
every_field = pytest.mark.parametrize("field", REMOVED)


def older_pickle(fields: dict[str, Any]) -> bytes:
    """A pickle of `NEW` with more fields."""
    scheme = pickle.loads(pickle.dumps(NEW))
    vars(scheme).update(fields)
    return pickle.dumps(scheme)


def test_fields_without_effect_are_passed_over() -> None:
    for scheme in (*SCHEMES.values(), NEW):
        assert Scheme.stored(scheme.to_dict() | REMOVED) == scheme
    again = pickle.loads(older_pickle(REMOVED))
    assert (again, vars(again)) == (NEW, vars(NEW))


@every_field
def test_fields_in_use_are_refused(field: str) -> None:
    fields = REMOVED | {field: IN_USE[field]}
    message = rf"scheme field '{field}' \({IN_USE[field]!r}\) was removed in hf_qknorm 0\.3: .* needs hf_qknorm 0\.2"
    for read in (Scheme.stored, Scheme.of, lambda data: pickle.loads(older_pickle(data))):
        with pytest.raises(ValueError, match=message):
            read(NEW.to_dict() | fields)
    with pytest.raises(TypeError, match=field):
        Scheme(**{field: IN_USE[field]})


def test_what_is_written_is_what_version_0_2_reads() -> None:
    """Version 0.2 demands the fields of `STORED`, and gives absent later ones the values that change nothing."""
    for scheme in (*SCHEMES.values(), NEW):
        written = scheme.to_dict()
        assert {*STORED} <= written.keys() <= {*STORED, "knee", "sharpness"}


def test_an_older_checkpoint_gives_the_same_bits(tmp_path: Path) -> None:
    model = randomise(patch_model(sharp_model("llama"), NEW, attn_implementation="hf_qknorm"))
    edit_config(save(model, tmp_path / "older"), lambda config: config["qk_norm"].update(REMOVED))
    again = loaded(tmp_path / "older")
    assert torch.equal(logits(again), logits(model))
    written = json.loads((save(again, tmp_path / "new") / "config.json").read_text())["qk_norm"]
    assert written == NEW.to_dict()


@every_field
def test_an_older_checkpoint_with_a_field_in_use_is_refused(field: str, tmp_path: Path, capsys: Any) -> None:
    save(patch_model(sharp_model("llama"), NEW), tmp_path / "older")
    edit_config(tmp_path / "older", lambda config: config["qk_norm"].update({field: IN_USE[field]}))
    with pytest.raises(ValueError, match=f"scheme field '{field}' .*needs hf_qknorm 0.2"):
        loaded(tmp_path / "older")
    assert cli.main(["export", str(tmp_path / "older"), str(tmp_path / "out")]) != 0
    assert f"scheme field '{field}'" in capsys.readouterr().err
