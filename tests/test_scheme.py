"""`Scheme`: accepted and refused values, error messages, and the JSON form."""

import dataclasses
import json
import math

import pytest

from hf_qknorm import SCHEMES, Scheme
from hf_qknorm.norms import NORMS
from hf_qknorm.scheme import field_values

SPELT_OUT = Scheme(q="lp", v="layer", gain="per_head", bias=True, p=3, scale=0.3, softcap=5, eps=1e-3)
UNFOLDED = Scheme(q="rms", k="l2", v="rms", gain="none", bias=False, pre_norm=False)


@pytest.mark.parametrize("preset", [*SCHEMES.values(), SPELT_OUT, UNFOLDED], ids=str)
def test_auto_resolves_to_rms_and_every_field_survives_json(preset: Scheme) -> None:
    resolved = preset.resolve()
    expected = ["rms" if norm == "auto" else norm for norm in (preset.q, preset.k, preset.v)]
    assert resolved == dataclasses.replace(preset, **dict(zip("qkv", expected, strict=True)))
    assert resolved.resolve() == resolved
    written = preset.to_dict()
    assert list(written) == ["q", "k", "v", "gain", "bias", "p", "scale", "softcap", "pre_norm", "eps"]
    assert written == {field: getattr(preset, field) for field in written}
    again = Scheme.stored(json.loads(json.dumps(written, allow_nan=False)))
    assert again == preset
    assert hash(again) == hash(preset)
    assert str(again) == str(preset)


NUMBER = "a finite number > 0, or None"
REFUSED = [
    *(({field: "batch"}, f"{field}='batch'", ", ".join(f'"{x}"' for x in NORMS)) for field in "qkv"),
    ({"q": "RMS"}, "q='RMS'", '"rms"'),
    ({"q": True}, "q=True", '"rms"'),
    ({"q": "rms", "gain": "per-head"}, "gain='per-head'", '"shared", "per_head", "scalar", "none"'),
    ({"gain": None}, "gain=None", '"shared"'),
    *(({field: x}, f"{field}={x!r}", NUMBER) for field in ("softcap", "scale") for x in (0, 0.0, -1, "50", True)),
    *(({field: x}, f"{field}={x!r}", NUMBER) for field in ("softcap", "scale") for x in (math.nan, math.inf, [50.0])),
    *(({"eps": x}, f"eps={x!r}", "a finite number > 0") for x in (0, -1e-6, math.nan, math.inf, True, None, "1e-6")),
    *(({"q": "lp", "p": x}, f"p={x!r}", "≥ 1") for x in (0.5, 0, -2, math.nan, math.inf, True, None, "3")),
    ({"q": "rms", "p": 3}, "p=3.0", "among q, k and v: no other norm"),
    ({"p": 1.5}, "p=1.5", "among q, k and v: no other norm"),
    ({"q": "rms", "bias": 1}, "bias=1", "True, False or None"),
    ({"bias": True}, "bias=True", "a norm on q, k or v"),
    ({"q": "l2", "gain": "scalar", "bias": True}, "bias=True", 'gain "shared", "per_head"'),
    ({"q": "rms", "gain": "none", "bias": True}, "bias=True", "a bias has the gain's shape"),
    ({"pre_norm": 0}, "pre_norm=0", "True or False"),
    ({"pre_norm": False}, "pre_norm=False", "q, k and v are all normed"),
    ({"q": "rms", "k": "rms", "pre_norm": False}, "pre_norm=False", "q, k and v are all normed"),
]


@pytest.mark.parametrize(("fields", "got", "expected"), REFUSED, ids=[str(fields) for fields, _, _ in REFUSED])
def test_an_impossible_value_is_refused_by_name(fields: dict, got: str, expected: str) -> None:
    with pytest.raises(ValueError, match="is not possible") as refusal:
        Scheme(**fields)
    message = str(refusal.value)
    assert message.startswith(f"Scheme({got}) is not possible: expected ")
    assert expected in message


@pytest.mark.parametrize(("key", "near"), [("softcaps", "softcap"), ("prenorm", "pre_norm"), ("Gain", "gain")])
def test_an_unknown_field_comes_with_a_suggestion(key: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"unknown scheme field {key!r}, did you mean '{near}'?") as refusal:
        Scheme.from_dict({"q": "rms", key: 1})
    assert all(field.name in str(refusal.value) for field in dataclasses.fields(Scheme))


@pytest.mark.parametrize("data", [None, 3, ["rms", "rms"], 50.0])
def test_other_types_are_refused(data: object) -> None:
    with pytest.raises(ValueError, match="a mapping of its fields, got") as refusal:
        Scheme.of(data)
    assert str(refusal.value).endswith(f"Presets: {', '.join(SCHEMES)}")


def test_of_takes_a_scheme_a_name_or_a_mapping() -> None:
    scheme = Scheme(q="rms", k="rms", softcap=50)
    assert Scheme.of(scheme) is scheme
    assert Scheme.of("qk_norm_cap") is SCHEMES["qk_norm_cap"]
    assert Scheme.of(scheme.to_dict()) == scheme


NEAREST = {"softcap": "soft_cap", "soft cap": "soft_cap", "qknorm": "qk_norm", "QK_NORM": "qk_norm"}
NEAREST |= {"QK-Norm-Cap": "qk_norm_cap", "henri": "henry", "Henry": "henry", "LP": "lp"}


@pytest.mark.parametrize("name", NEAREST)
def test_an_unknown_preset_comes_with_a_suggestion_and_the_list(name: str) -> None:
    with pytest.raises(ValueError, match="unknown scheme") as refusal:
        Scheme.of(name)
    assert str(refusal.value).startswith(
        f"unknown scheme '{name}', did you mean '{NEAREST[name]}'? Presets: {', '.join(SCHEMES)}; or spell one out: "
    )


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Scheme)])
def test_the_listed_values_are_possible_and_others_are_not(field):
    listed = field_values()[field]
    normed = dict.fromkeys("qkv", "rms")
    literal = {"true": True, "false": False}
    if " number" in listed:
        assert Scheme(**{**normed, "q": "lp", field: 2}) is not None
        assert ("≥ 0" in listed) == is_possible({**normed, field: 0})
    else:
        assert all(is_possible({**normed, field: literal.get(value, value)}) for value in listed.split(" | "))
        assert not is_possible({**normed, field: "another"})


def is_possible(fields):
    try:
        Scheme(**fields)
    except ValueError:
        return False
    return True
