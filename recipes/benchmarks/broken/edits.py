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


@dataclass(frozen=True)
class Edit:
    """One change to the files of a checkpoint.

    `apply` skips files that the folder lacks. `names` are words of which an error message must have one, beside names
    of files. A `harmless` edit leaves a sound checkpoint. An `unprivileged` one needs a process without root rights.
    """

    text: str
    apply: Callable[[Path], None]
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
LARGEST = 2**24  # bytes of a file that an edit changes
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


def can_be_read(path: Path) -> bool:
    """Whether this is a plain file of a few bytes: an earlier edit may have put a GiB, a device or a pipe there."""
    return path.is_file() and path.stat().st_size <= LARGEST


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not can_be_read(path):
        raise ValueError(f"{path} is what an earlier edit put there: it is not read")
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def on_config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Apply `change` to the content of config.json."""

    def apply(folder: Path) -> None:
        config = read_config(folder)
        change(config)
        (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")

    return apply


def field(folder: Path, draw: Random) -> Edit:
    """Set a field to another value: of a wrong type, out of range, or a possible one."""
    config = read_config(folder)
    own = ("qk_norm", "qk_norm_base", "qk_norm_blend", "model_type", "architectures")
    name = draw.choice(sorted(key for key in config if key not in own))
    old = config[name]
    by_type = {bool: FLAGS, int: SIZES, float: NUMBERS, str: TEXTS, list: LISTS}
    value = draw.choice([v for v in by_type.get(type(old), (*LISTS, *NUMBERS)) if v is not old])
    if isinstance(old, int | float) and not isinstance(old, bool) and draw.random() < 0.2:
        value = draw.choice((old * 2, old + 1, -old, str(old)))
    if isinstance(old, dict) and old and draw.random() < 0.7:  # inside it
        key, value = draw.choice(sorted(old)), draw.choice((*NUMBERS, *TEXTS))
        return Edit(
            f"{name}.{key} = {shortened(value)}",
            on_config(lambda c: c[name].__setitem__(key, copy.deepcopy(value))),
            (name, key),
        )

    def change(config: dict[str, Any]) -> None:
        if name in config:
            config[name] = value

    return Edit(f"{name} = {shortened(value)}", on_config(change), (name,))


def missing(folder: Path, draw: Random) -> Edit:
    """Remove a field."""
    config = read_config(folder)
    names = draw.sample(sorted(config), draw.choice((1, 1, 2, 4)))
    return Edit(
        f"without {', '.join(names)}",
        on_config(lambda c: [c.pop(name, None) for name in names]),
        tuple(names),
    )


def added(folder: Path, draw: Random) -> Edit:
    """Add a field that the model does not have, or that overrides its type."""
    name = draw.choice(sorted(ADDED))
    value = draw.choice(ADDED[name])
    return Edit(f"{name} = {shortened(value)}", on_config(lambda c: c.__setitem__(name, copy.deepcopy(value))), (name,))


def kind(folder: Path, draw: Random) -> Edit:
    """Set a model_type and architectures that contradict each other, or that do not exist."""
    types = ("llama", "gpt2", "qknorm_llama", "qknorm_gpt2", "qknorm_mistral", "qknorm_bogus", "bogus", "bert", "qwen3")
    classes = ("LlamaForCausalLM", "GPT2LMHeadModel", "QKNormLlamaForCausalLM", "LlamaModel", "BertModel", "Bogus")
    classes += ("Qwen3ForCausalLM", "PretrainedConfig", "AutoModel", "__class__", "T5ForConditionalGeneration")
    config = read_config(folder)
    types += tuple(config["model_type"].removeprefix("qknorm_") for _ in range(4))
    values: dict[str, Any] = {}
    if draw.random() < 0.6:
        values["model_type"] = draw.choice((*types, "", None, 3, [], "../llama", "a" * 500))
    if not values or draw.random() < 0.4:
        values["architectures"] = draw.choice(
            (*([name] for name in classes), None, [], [None], "LlamaForCausalLM", 3, {}, ["a", "b"])
        )
    text = ", ".join(f"{name} = {shortened(value)}" for name, value in values.items())
    return Edit(
        text, on_config(lambda c: c.update(copy.deepcopy(values))), (*values, "model type", "attention", "qk_norm")
    )


def scheme(folder: Path, draw: Random) -> Edit | None:
    """Change, remove or add a field of the scheme, or contradict it elsewhere."""
    config = read_config(folder)
    if "qk_norm" not in config:
        return None
    way = draw.choice(("value", "value", "value", "missing", "unknown", "whole", "cap", "base", "blend"))
    whole = (None, "qk_norm", "qk_norm_cap", "bogus", "", {}, [], 3, True, {"q": "rms"}, [["q", "rms"]], NESTED)
    caps = (None, 5.0, 50.0, 0, -1, "50", math.nan, True)
    bases = (None, {}, {"attn_logit_softcapping": None}, {"attn_logit_softcapping": 5.0}, {"a": 1}, 3, "x")
    blends = (None, {}, {"norms": True, "softcap": 50.0}, {"norms": False, "softcap": None}, {"norms": 1}, 3)
    name = {"cap": "attn_logit_softcapping", "base": "qk_norm_base", "blend": "qk_norm_blend"}.get(way, "qk_norm")
    if way in ("value", "missing", "unknown"):
        keys: dict[str, Any] = {
            "value": SCHEME,
            "missing": config[name],
            "unknown": ("Q", "kneee", "softCap", "__class__"),
        }
        key = draw.choice(sorted(keys[way]))
        value = draw.choice(SCHEME[key]) if key in SCHEME else 1.0
        both = key == "softcap" and draw.random() < 0.5  # with what servers read

        def change(config: dict[str, Any]) -> None:
            if way == "missing":
                del config[name][key]
                return
            config[name][key] = copy.deepcopy(value)
            if both:
                config["attn_logit_softcapping"] = value

        said = f"{name}.{key} " + ("is missing" if way == "missing" else f"= {shortened(value)}")
        return Edit(said, on_config(change), (name, "scheme", "Scheme", f"{key}=", "attn_logit_softcapping"))
    value = draw.choice({"whole": whole, "cap": caps, "base": bases, "blend": blends}[way])
    drop = way == "whole" and draw.random() < 0.3

    def put(config: dict[str, Any]) -> None:
        if "qk_norm" in config:
            config.pop(name) if drop else config.__setitem__(name, copy.deepcopy(value))

    return Edit(
        f"without {name}" if drop else f"{name} = {shortened(value)}", on_config(put), (name, "scheme", "qk_norm")
    )


def text(folder: Path, draw: Random) -> Edit:
    """Make config.json invalid as text or JSON, with a duplicate key, or of another kind."""
    share = draw.random()
    bomb = 10 ** draw.choice((2, 3, 5))
    ways: dict[str, Callable[[bytes], bytes]] = {
        f"truncated to {share:.0%}": lambda b: b[: int(len(b) * share)],
        "empty": lambda b: b"",
        "blank": lambda b: b"  \n",
        "binary": lambda b: bytes(range(256)) * 4,
        "with a byte-order mark": lambda b: b"\xef\xbb\xbf" + b,
        "UTF-16": lambda b: b.decode().encode("utf-16"),
        "Latin-1": lambda b: b.replace(b'"model_type"', b'"\xe9": 1, "model_type"'),
        "with NUL bytes": lambda b: b + b"\0" * 8,
        "twice": lambda b: b + b,
        "a list": lambda b: b"[" + b + b"]",
        "null": lambda b: b"null",
        "a number": lambda b: b"7",
        "a text": lambda b: b'"llama"',
        f"nested {bomb} deep": lambda b: b.replace(b"{", b'{"a": ' + b"[" * bomb + b"]" * bomb + b",", 1),
        "a field twice": lambda b: twice(b, share),
        "with a comment": lambda b: b"// hello\n" + b,
        "a comma too many": lambda b: b.rstrip().removesuffix(b"}") + b",}",
        "a number of 5,000 digits": lambda b: b.replace(b"{", b'{"a": ' + b"9" * 5000 + b",", 1),
        "a lone surrogate": lambda b: b.replace(b"{", b'{"a": "\\ud800",', 1),
    }
    way = draw.choice(sorted(ways))
    return Edit(f"config.json {way}", rewriting(CONFIG, ways[way]), (CONFIG,))


def twice(data: bytes, share: float) -> bytes:
    """Give a field of a config a second, different value."""
    config = json.loads(data)
    ours = ("qk_norm", "attn_", "experts_implementation")  # which the unpatched twin does not have
    names = sorted(name for name in config if not name.startswith(ours))
    name = names[int(share * len(names))]
    other = {"hidden_size": 64}.get(name, 3)
    return data.rstrip().removesuffix(b"}") + f', "{name}": {other}}}'.encode()


def rewriting(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Rewrite the bytes of a file, if it exists."""

    def apply(folder: Path) -> None:
        path = folder / name
        if can_be_read(path):
            path.write_bytes(change(path.read_bytes()))

    return apply


def shortened(value: Any) -> str:
    said = repr(value)
    return said if len(said) < 60 else f"{said[:50]}… ({len(said)} characters)"
