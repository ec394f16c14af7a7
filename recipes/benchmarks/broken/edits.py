"""Edits that break a checkpoint: drawn for a sound checkpoint, applied to it and to its unpatched twin alike."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

CONFIG = "config.json"
LARGEST = 2**24  # bytes of a file that an edit changes
ABSENT = object()


@dataclass(frozen=True)
class Edit:
    """One change to the files of a checkpoint.

    `apply` skips files that the folder lacks. `names` are words of which an error message must have one, beside names
    of files. A `harmless` edit leaves a sound checkpoint. An `unprivileged` one needs a process without root rights.
    """

    text: str
    apply: Callable[[Path], object]
    names: tuple[str, ...] = ()
    harmless: bool = False
    unprivileged: bool = False


Draw = Callable[[Path, Random], Edit | None]  # None: there is nothing of the kind in this checkpoint

NESTED: list[Any] = []
for _ in range(150):
    NESTED = [NESTED]
SIZES = (-1, 0, 1, 3, 7, 0.5, True, "32", None, [], {}, 10**5, 2**31, 2**63, 10**30, math.nan)
NUMBERS = (-1.0, 0, 1e-300, 0.3, 2, 1e308, math.nan, math.inf, True, "0.1", None, [1.0], {"a": 1})
FLAGS = (True, False, None, "yes", "false", 2, [], {})
TEXTS = ("", "bogus", "relu", "a\x00b", "é" * 300, None, 3, -1, True, [], ["gelu"], {}, {"a": {"b": []}}, NESTED)
LISTS = (None, [], [None], ["bogus"], "bogus", 5, {}, [[[]]], ["a"] * 9, NESTED)
ADDED: dict[str, tuple[Any, ...]] = {
    "base_model_type": ("llama", "gpt2", "bogus", None, 3, {}),
    "sliding_window": (4, -1, 0, "4", None, 2**40),
    "layer_types": (["full_attention"], ["bogus", "bogus"], ["sliding_attention"] * 2, 3, {}),
    "rope_scaling": ({"rope_type": "bogus"}, {"rope_type": "linear"}, {"rope_type": "linear", "factor": -2.0}, [], 3),
    "rope_parameters": ({"rope_type": "bogus"}, {"rope_type": "dynamic", "factor": "x"}, {"rope_theta": 0}, [], 7),
    "quantization_config": ({"quant_method": "bogus"}, {"quant_method": "bitsandbytes"}, [], "int8", {}, 5),
    "dtype": ("float16", "bfloat16", "int8", "bool", "bogus", 3, {}, None),
    "torch_dtype": ("float16", "float64", "bogus"),
    "attn_implementation": ("eager", "bogus", 3, {"": "eager"}),
    "_attn_implementation": ("eager", "bogus", 3),
    "_attn_implementation_internal": ("eager", "bogus"),
    "attn_logit_softcapping": (5.0, -1, 0, math.nan, "50", True),
    "final_logit_softcapping": (1.0, 0, "x"),
    "auto_map": ({"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, [], "x", {"AutoConfig": 3}),
    "tie_word_embeddings": (True, False, None, "yes"),
    "is_decoder": (True, False, 3),
    "is_causal": (False, True, "no"),
    "use_bidirectional_attention": (True, "yes"),
    "add_cross_attention": (True,),
    "head_dim": (8, 4, 3, 16, -8, 0, "8", None),
    "num_key_value_heads": (1, 3, 4, 0, "2"),
    "query_pre_attn_scalar": (1, 64, 0, "x"),
    "partial_rotary_factor": (0.5, 0.3, 0, 2, "x"),
    "attention_bias": (True, "yes"),
    "id2label": ({"0": "a"}, {"x": "a"}, [], 3),
    "transformers_version": (3, None, "99.0", []),
    "text_config": ({}, {"model_type": "llama"}, {"model_type": "bogus"}, 3),
    "vision_config": ({"model_type": "bogus"}, 3),
    "pruned_heads": ({"0": [1]}, [], 3),
    "qk_norm": ("qk_norm", "bogus", {}, {"q": "rms"}, 3, None, []),
    "qk_norm_base": ({}, {"attn_logit_softcapping": 5.0}, 3),
    "qk_norm_blend": ({}, {"norms": True, "softcap": None}, {"norms": False, "softcap": 5.0}, 3),
    "qk_norm_scheme": ("qk_norm",),
}
SCHEME: dict[str, tuple[Any, ...]] = {
    "q": ("rms", "layer", "l2", "lp", "auto", None, "bogus", "RMS", 3, [], True),
    "k": ("rms", "layer", "l2", "lp", "auto", None, "bogus", 3, {}),
    "v": ("rms", "layer", "auto", None, "bogus", 3),
    "gain": ("shared", "per_head", "scalar", "none", None, "bogus", 3, []),
    "bias": (True, False, None, "yes", 0, 1),
    "p": (2.0, 3.0, 0.5, 1, math.nan, math.inf, -3, "3", None, 10**400),
    "scale": (None, 1.0, 0.1, 0, -1, math.nan, "1", [], 10**400),
    "softcap": (None, 50.0, 20.0, 1.0, 0, -50, math.nan, math.inf, "50", True, [50.0]),
    "pre_norm": (True, False, None, "no", 0),
    "eps": (1e-6, 1e-2, 0, -1e-6, math.nan, "x", None, 1e308),
    "knee": (0, 0.5, 4.0, 16, -1, math.nan, math.inf, "4", None, True, [4.0], 10**400),
}
TYPES = ("llama", "gpt2", "qknorm_llama", "qknorm_gpt2", "qknorm_mistral", "qknorm_bogus", "bogus", "bert", "qwen3",
         "", None, 3, [], "../llama", "a" * 500)  # fmt: skip
CLASSES = (["LlamaForCausalLM"], ["GPT2LMHeadModel"], ["QKNormLlamaForCausalLM"], ["LlamaModel"], ["BertModel"],
           ["Bogus"], ["Qwen3ForCausalLM"], ["PretrainedConfig"], ["AutoModel"], ["__class__"], None, [], [None],
           ["T5ForConditionalGeneration"], "LlamaForCausalLM", 3, {}, ["a", "b"])  # fmt: skip
WHOLE: dict[str, tuple[Any, ...]] = {  # the fields that hold the scheme, as a whole
    "qk_norm": (None, "qk_norm", "qk_norm_cap", "bogus", "", {}, [], 3, True, {"q": "rms"}, [["q", "rms"]], NESTED,
                ABSENT, ABSENT),
    "attn_logit_softcapping": (None, 5.0, 50.0, 0, -1, "50", math.nan, True),
    "qk_norm_base": (None, {}, {"attn_logit_softcapping": None}, {"attn_logit_softcapping": 5.0}, {"a": 1}, 3, "x"),
    "qk_norm_blend": (None, {}, {"norms": True, "softcap": 50.0}, {"norms": False, "softcap": None}, {"norms": 1}, 3),
}  # fmt: skip
OWN = ("qk_norm", "qk_norm_base", "qk_norm_blend", "model_type", "architectures")


def can_be_read(path: Path) -> bool:
    """Whether this is a plain file of a few bytes: an earlier edit may have put a GiB, a device or a pipe there."""
    return path.is_file() and path.stat().st_size <= LARGEST


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not can_be_read(path):
        raise ValueError(f"{path} is what an earlier edit put there: it is not read")
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def configured(values: dict[tuple[str, ...], Any], words: tuple[str, ...] = (), beside: str | None = None) -> Edit:
    """Set fields of config.json, or remove those that are ABSENT, by their places; only `beside` a field, if given."""

    def apply(folder: Path) -> None:
        config = read_config(folder)
        for (*outer, name), value in values.items() if beside in (None, *config) else ():
            node = config
            for key in outer:
                node = node[key]
            if value is ABSENT:
                node.pop(name, None)
            else:
                node[name] = copy.deepcopy(value)
        (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")

    said = {".".join(place): value for place, value in values.items()}
    text = ", ".join(f"without {x}" if y is ABSENT else f"{x} = {shortened(y)}" for x, y in said.items())
    return Edit(text, apply, (*(name for place in values for name in place), *words))


def field(folder: Path, draw: Random) -> Edit:
    """Set a field to another value: of a wrong type, out of range, or a possible one."""
    config = read_config(folder)
    name = draw.choice(sorted(key for key in config if key not in OWN))
    old = config[name]
    if isinstance(old, dict) and old and draw.random() < 0.7:  # inside it
        return configured({(name, draw.choice(sorted(old))): draw.choice((*NUMBERS, *TEXTS))}, beside=name)
    by_type = {bool: FLAGS, int: SIZES, float: NUMBERS, str: TEXTS, list: LISTS}
    value = draw.choice([v for v in by_type.get(type(old), (*LISTS, *NUMBERS)) if v is not old])
    if isinstance(old, int | float) and not isinstance(old, bool) and draw.random() < 0.2:
        value = draw.choice((old * 2, old + 1, -old, str(old)))
    return configured({(name,): value}, beside=name)


def missing(folder: Path, draw: Random) -> Edit:
    """Remove one or several fields."""
    names = draw.sample(sorted(read_config(folder)), draw.choice((1, 1, 2, 4)))
    return configured({(name,): ABSENT for name in names})


def added(folder: Path, draw: Random) -> Edit:
    """Add a field that the model does not have, or that overrides its type."""
    name = draw.choice(sorted(ADDED))
    return configured({(name,): draw.choice(ADDED[name])})


def kind(folder: Path, draw: Random) -> Edit:
    """Set a model_type and architectures that contradict each other, or that do not exist."""
    own = read_config(folder)["model_type"].removeprefix("qknorm_")
    values = {("model_type",): draw.choice((*TYPES, *[own] * 4)), ("architectures",): draw.choice(CLASSES)}
    some = draw.choice(((0,), (0,), (1,), (0, 1)))
    chosen = {place: value for n, (place, value) in enumerate(values.items()) if n in some}
    return configured(chosen, ("model type", "attention", "qk_norm"))


def scheme(folder: Path, draw: Random) -> Edit | None:
    """Change, remove or add a field of the scheme, or contradict it elsewhere."""
    config = read_config(folder)
    if "qk_norm" not in config:
        return None
    way, said = draw.random(), ("scheme", "Scheme", "attn_logit_softcapping", "qk_norm")
    if way < 0.45:  # another value; half of the caps also for servers, which read theirs elsewhere
        key = draw.choice(sorted(SCHEME))
        values = {("qk_norm", key): draw.choice(SCHEME[key])}
        if key == "softcap" and draw.random() < 0.5:
            values["attn_logit_softcapping",] = values["qk_norm", key]
        said += (f"{key}=",)
    elif way < 0.55:
        values = {("qk_norm", draw.choice(sorted(config["qk_norm"]))): ABSENT}
    elif way < 0.65:
        values = {("qk_norm", draw.choice(("Q", "kneee", "softCap", "__class__"))): 1.0}
    else:
        name = draw.choice(sorted(WHOLE))
        values = {(name,): draw.choice(WHOLE[name])}
    return configured(values, said, beside="qk_norm")


def shortened(value: Any) -> str:
    said = repr(value)
    return said if len(said) < 60 else f"{said[:50]}… ({len(said)} characters)"
