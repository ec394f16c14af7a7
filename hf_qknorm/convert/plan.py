"""What a conversion will do to the tensors and files of a checkpoint, known before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_qknorm.checkpoint.complete import check_complete
from hf_qknorm.checkpoint.safetensors_files import NewTensor, Weights
from hf_qknorm.checkpoint.source import Source
from hf_qknorm.convert.request import Request
from hf_qknorm.families.class_names import PREFIX, TYPE_PREFIX
from hf_qknorm.files.names import CONFIG, INDEX
from hf_qknorm.model.attention import QKNormAttention, head_norms, patched_layers
from hf_qknorm.model.derived import derived_model
from hf_qknorm.model.fold import fold_weight
from hf_qknorm.patch import patched_config
from hf_qknorm.scheme import Scheme


@dataclass(frozen=True)
class Plan:
    """What a conversion will do: from where, to where, which tensors come and go, which files travel."""

    source: str
    destination: str
    model_type: str
    scheme: Scheme
    parameters: int
    added: tuple[str, ...]
    added_parameters: int
    changed: tuple[str, ...]
    removed: tuple[str, ...]
    files: tuple[str, ...]
    left: tuple[str, ...]
    size: int  # bytes to be written
    unread: tuple[str, ...] = ()  # of `left`, the files with weights that transformers does not read either
    unused: tuple[str, ...] = ()  # tensors that the model does not read, copied as they are
    knees: tuple[str, ...] = ()  # tensors that come as well where the calibration finds a knee above 0

    def __str__(self) -> str:
        """A few lines for people."""

        def listed(names: tuple[str, ...]) -> str:
            return f"{len(names)} tensors, first {names[0]}" if names else "nothing"

        lines = {
            "source": f"{self.source} ({self.model_type}, {self.parameters:,} parameters)",
            "destination": f"{self.destination} ({TYPE_PREFIX}{self.model_type}, {self.size / 1e6:,.1f} MB)",
            "scheme": str(self.scheme),
            "adds": f"{self.added_parameters:,} parameters: {listed(self.added)}",
            "changes": listed(self.changed),
            "removes": listed(self.removed),
            "copies": ", ".join(self.files) or "no other files",
            "leaves out": ", ".join(self.left) or "nothing",
        }
        if self.knees:
            lines["knee"] = f"found by calibration; above 0 it adds {listed(self.knees)}"
        if self.unread:
            lines["not read"] = f"{', '.join(self.unread)}: transformers reads other files of this folder"
        if self.unused:
            lines["not used"] = f"{listed(self.unused)}: copied, and not read by the model"
        return "\n".join(f"{what:12}{text}" for what, text in lines.items())


def make_plan(source: Source, dst: Path, request: Request) -> Plan:
    """The plan of a conversion.

    Raises ValueError, naming file and tensor, unless the converted model finds all that it asks for.
    """
    weights, scheme = source.weights, request.scheme
    new, removed = new_tensors(source, request)
    with_knee = new_tensors(source, replace(request, scheme=replace(scheme, knee=1.0)))[0] if request.searched else new
    tensors = weights.tensors(new, removed)
    model_class = derived_model(source.model_class)
    unused = check_complete(model_class, converted_config(source, scheme), tensors, weights.folder)
    added = tuple(name for name in new if name not in weights)
    taken = {CONFIG, *weights.files, *map(str, source.files)}
    if weights.index is not None:
        taken.add(INDEX)
    files = sum((source.folder / file).stat().st_size for file in source.files)
    return Plan(
        source=source.name,
        destination=str(dst),
        model_type=source.config.model_type,
        scheme=scheme,
        parameters=weights.parameters,
        added=added,
        added_parameters=sum(torch.Size(new[name].shape).numel() for name in added),
        changed=tuple(name for name in new if name in weights),
        removed=tuple(sorted(removed)),
        files=tuple(map(str, source.files)),
        left=tuple(sorted(p.name for p in source.folder.iterdir() if p.is_file() and p.name not in taken)),
        size=sum(tensor.size for tensor in weights.tensors(with_knee, removed).values()) + files,
        unread=source.unread,
        unused=unused,
        knees=tuple(name for name in with_knee if name not in new),
    )


def converted_config(source: Source, scheme: Scheme) -> Any:
    """The config of the converted model."""
    config = patched_config(source.config, scheme)
    config.architectures = [f"{PREFIX}{source.model_class.__name__}"]
    vars(config).pop("auto_map", None)  # it names code for the model that it was
    return config


def _skeleton(source: Source, scheme: Scheme) -> nn.Module:
    """The converted model without weights: its modules say what the new parameters are called, and their shapes."""
    with torch.device("meta"):
        return derived_model(source.model_class)(converted_config(source, scheme))


def new_tensors(source: Source, request: Request) -> tuple[dict[str, NewTensor], set[str]]:
    """The tensors that a conversion adds or changes, and the names of those that it removes.

    They are as they would be without calibration: one gives gains and knees other values, and where it moves
    projections, those too.
    """
    scheme = request.scheme
    new: dict[str, NewTensor] = {}
    removed: set[str] = set()
    model: Any = _skeleton(source, scheme)
    for name, layer in patched_layers(model).items():
        if not (head_norms(layer) or request.moves or not scheme.pre_norm):
            continue  # a cap has no tensors
        prefix = stored_name(source.weights, model.base_model_prefix, name, layer)
        projection = f"{prefix}.{layer.family.style.weights[0]}.weight"
        file, dtype = source.weights.stored[projection].file, source.weights.dtype(projection)
        for norm_name, norm in head_norms(layer).items():
            for kind, parameter in norm.named_parameters():
                start = norm.fresh if kind == "weight" else 0.0
                shape = tuple(parameter.shape)
                new[f"{prefix}.{norm_name}.{kind}"] = NewTensor(file, shape, dtype, partial(torch.full, shape, start))
            for kind, buffer in norm.named_buffers():
                new[f"{prefix}.{norm_name}.{kind}"] = NewTensor(
                    file, (), buffer.dtype, partial(torch.full, (), norm.floor)
                )
        parts = layer.family.style.weights
        if request.moves:
            moved = (f"{prefix}.{part}.{kind}" for part in parts for kind in ("weight", "bias"))
            new |= {key: _as_stored(source.weights, key) for key in moved if key in source.weights}
        if not scheme.pre_norm:
            pre_norm = f"{prefix.rpartition('.')[0]}.{layer.family.pre_norm}"
            removed |= {key for key in (f"{pre_norm}.weight", f"{pre_norm}.bias") if key in source.weights}
            for part in parts:
                key = f"{prefix}.{part}.weight"
                transposed = isinstance(layer.get_submodule(part), Conv1D)
                make = partial(_folded, source.weights, key, pre_norm, layer, transposed)
                new[key] = replace(_as_stored(source.weights, key), make=make)
    return new, removed


def _as_stored(weights: Weights, key: str) -> NewTensor:
    stored = weights.stored[key]
    return NewTensor(stored.file, stored.shape, weights.dtype(key), partial(weights.read, key))


def _folded(weights: Weights, key: str, pre_norm: str, layer: QKNormAttention, transposed: bool) -> Tensor:
    return fold_weight(weights.read(key), weights.read(f"{pre_norm}.weight"), layer.family, transposed=transposed)


def stored_name(weights: Weights, base_prefix: str, name: str, layer: QKNormAttention) -> str:
    """What the weights call a layer: checkpoints may hold a model's base alone, without its prefix, or with it."""
    start = f"{base_prefix}."
    for candidate in (name, name.removeprefix(start), start + name):
        if all(f"{candidate}.{part}.weight" in weights for part in layer.family.style.weights):
            return candidate
    projection = f"{name}.{layer.family.style.weights[0]}.weight"
    raise ValueError(
        f"{weights.folder}: {projection} is not stored under that name: transformers renames, splits or shares tensors "
        "when it loads this model, and a conversion of files does not. Load the model, and call patch_model and "
        "save_pretrained"
    )


def check_exact_fold(source: Source, scheme: Scheme) -> None:
    """Raise ValueError for a bias that `pre_norm=False` can't fold without having seen text."""
    model: Any = _skeleton(source, scheme)
    for name, layer in patched_layers(model).items():
        prefix = stored_name(source.weights, model.base_model_prefix, name, layer)
        pre_norm = f"{prefix.rpartition('.')[0]}.{layer.family.pre_norm}"
        for key in (f"{pre_norm}.bias", *(f"{prefix}.{part}.bias" for part in layer.family.style.weights)):
            if key in source.weights and bool(source.weights.read(key).any()):
                raise ValueError(
                    f"pre_norm=False can't fold {key} exactly: how large it must be depends on the text that the model "
                    "sees. Pass calibration= (--calibrate)"
                )
