"""Edits of tensors: missing, renamed, of another shape or dtype, or without a place in the model."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from random import Random

from broken.edits import Edit, read_config
from broken.stored import SIZE_OF, Tensors, files, on_tensor, recast, tensors

GAINS = ("q_norm", "k_norm", "v_norm")


def names(folder: Path, gains: bool) -> list[str]:
    """Return the tensors of a checkpoint: the gains of the scheme, or all others."""
    found = sorted(name for file in files(folder) for name in tensors(folder / file))
    return [name for name in found if bool({*GAINS} & {*name.split(".")}) is gains]


def parts(name: str) -> tuple[str, ...]:
    """Return the names by which a message may call a tensor: its own, its module, or a part that no other tensor
    has.
    """
    return (name, name.rpartition(".")[0], *(part for part in name.split(".") if "_" in part))


def changed_tensor(name: str, draw: Random, gains: bool) -> Edit:
    """Remove a tensor, rename it, change its shape or dtype, or add another beside it."""
    dtype = draw.choice(("I8", "BOOL", "F8_E4M3", "I32", "F16", "BF16", "F64", "U8", "I64"))
    way = draw.choice(("dropped", "dropped", "dtype", "shape", "one", "renamed", "twice", "flat", "empty", "rows"))

    def change(content: Tensors) -> None:
        old, shape, data = content[name]
        count = len(data) // SIZE_OF[old]
        if way in ("dropped", "renamed"):
            kept = content.pop(name)
            if way == "renamed":
                content[f"{name}s"] = kept
        elif way == "dtype":
            content[name] = dtype, shape, recast(data, dtype) or (data * 2)[: count * SIZE_OF[dtype]]
        elif way == "shape":
            size = shape[-1] if shape else 1
            content[name] = old, [*shape[:-1], size + 1], (data * 2)[: len(data) // size * (size + 1)]
        elif way == "one":
            content[name] = old, [1], data[: SIZE_OF[old]]
        elif way == "flat":
            content[name] = old, [1, *shape], data
        elif way == "empty":
            content[name] = old, [0], b""
        elif way == "rows":
            content[name] = old, [*shape, 1], data
        else:
            content[f"model.{name}"] = content[name]

    text = {"dtype": f"of {dtype}", "one": "of shape [1]", "flat": "with a dimension more", "rows": "with a last one"}
    said = (*parts(name), *(() if not gains else ("norm", "gain", "qk_norm", "blend")))
    return Edit(f"{name} {text.get(way, way)}", on_tensor(name, change, listed=False), said)


def tensor(folder: Path, draw: Random) -> Edit:
    """Change a tensor that any model has."""
    return changed_tensor(draw.choice(names(folder, gains=False)), draw, gains=False)


def changed_knee(name: str, draw: Random) -> Edit:
    """Set a knee's eps to another value, impossible or possible."""
    value = draw.choice((math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-12, 2.5))
    change = lambda content: content.__setitem__(name, ("F32", [], struct.pack("<f", value)))  # noqa: E731
    return Edit(f"{name} = {value}", on_tensor(name, change), parts(name))


def gain(folder: Path, draw: Random) -> Edit | None:
    """Change a tensor of the scheme, remove all of them, or add one that the scheme does not have."""
    own = names(folder, gains=True)
    way = draw.random()
    knees = [name for name in own if name.endswith(".eps")]
    if knees and way < 0.25:
        return changed_knee(draw.choice(knees), draw)
    if own and way < 0.7:
        return changed_tensor(draw.choice(own), draw, gains=True)
    if own and way < 0.85:
        layer = own[0].rpartition(".")[0]

        def drop_all(folder: Path) -> None:
            for name in own:
                on_tensor(name, lambda content, name=name: content.pop(name), listed=False)(folder)

        return Edit("no gains at all", drop_all, (*parts(layer), "norm", "gain", "qk_norm", "blend"))
    beside = draw.choice(names(folder, gains=False))
    config = read_config(folder)
    if "qk_norm" not in config:
        return None
    gains = [name for name in own if name.endswith(".weight")]
    example = gains[0] if gains else "model.layers.0.self_attn.q_norm.weight"
    new = draw.choice(
        (
            example.replace("q_norm.weight", "v_norm.bias"),
            example.replace("weight", "blend"),
            example.replace("weight", "eps"),
            example.replace(".0.", ".9."),
            example.replace("q_norm", "knee"),
        )
    )
    if new in own:
        return None
    change = lambda content: content.__setitem__(new, ("F32", [8], b"\0\0\x80\x3f" * 8))  # noqa: E731
    return Edit(f"{new} added", on_tensor(beside, change, listed=True), (*parts(new), "norm"))
