"""The plan of a conversion: its options, and the tensors and files that it adds, changes, removes and copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from hf_qknorm.calibration.options import Knee, resolve_method
from hf_qknorm.checkpoint.complete import check_complete
from hf_qknorm.checkpoint.memory import parse_size
from hf_qknorm.checkpoint.safetensors_files import NewTensor, StoredTensor, Weights
from hf_qknorm.checkpoint.source import Source
from hf_qknorm.families.class_names import PREFIX, TYPE_PREFIX
from hf_qknorm.files.names import CARD, CODE_FILE, CONFIG, INDEX, KEPT_CARD, REPORT
from hf_qknorm.hub.metadata import is_generated_card
from hf_qknorm.model.attention import QKNormAttention, head_norms, patched_layers
from hf_qknorm.model.derived import derived_model
from hf_qknorm.model.fold import fold_weight
from hf_qknorm.ops.norms import PLAIN
from hf_qknorm.patch import patched_config
from hf_qknorm.reports.tables import fields_html
from hf_qknorm.scheme import Scheme


@dataclass(frozen=True)
class Options:
    """A scheme, and options as for `convert_checkpoint`; the options of a calibration are None without one."""

    scheme: Scheme
    method: str | None = None
    knee: Knee | None = None
    max_loss_increase: float | None = None
    length: int | None = None
    max_tokens: int | None = None
    max_memory: int | str | None = None
    standalone: bool = True
    exportable: bool = False

    def checked(self, calibration: Any) -> Options:
        """Return the options with the defaults of a calibration, if there is one. Raises ValueError for wrong ones."""
        if calibration is None:
            for name in ("method", "knee", "max_loss_increase", "length", "max_tokens", "max_memory"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is for a calibration, on text: pass calibration= as well")
            if self.exportable:
                raise ValueError("exportable is for a calibration: pass calibration= (--calibrate TEXT) as well")
            return self
        if self.max_memory is not None:
            parse_size(self.max_memory)
        method, knee = resolve_method(self.scheme, self.method, self.knee, self.max_loss_increase, self.exportable)
        return replace(self, method=method, knee=knee)

    @property
    def changes_projections(self) -> bool:
        """Whether the calibration changes the projections' weights."""
        return self.method is not None and not self.scheme.pre_norm


@dataclass(frozen=True)
class Plan:
    """The plan of a conversion: its source, destination and scheme, and the tensors and files that it touches.

    Tensors: `added` (of `added_parameters` numbers), `changed`, `removed`; `unused` ones are copied, although the model
    does not read them. Files: `files` are copied, `left` are not; of these, `unread` hold weights that transformers
    does not read either; `written` are written anew. `size` is in bytes.

    >>> plan = qk.plan_conversion("llama", "converted", "qk_norm")
    >>> plan.added[0], plan.removed
    ('model.layers.0.self_attn.q_norm.weight', ())
    """

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
    size: int
    unread: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    written: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(f"{title:12}{text}" for title, text in self._lines().items())

    def _repr_html_(self) -> str:
        return fields_html(self._lines())

    def _lines(self) -> dict[str, str]:
        """The plan's text by title."""

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
            "writes": ", ".join(self.written),
        }
        if self.unread:
            lines["not read"] = f"{', '.join(self.unread)}: transformers reads other files of this folder"
        if self.unused:
            lines["not used"] = f"{listed(self.unused)}: copied, and not read by the model"
        return lines


def make_plan(source: Source, dst: Path, options: Options) -> Plan:
    """Return the plan of a conversion. Raises ValueError, naming file and tensor, if the model would lack a tensor."""
    weights, scheme = source.weights, options.scheme
    new, tensors = new_tensors(source, options)
    model_class = derived_model(source.model_class)
    unused = check_complete(model_class, converted_config(source, scheme), tensors, weights.folder)
    added = tuple(name for name in new if name not in weights)
    taken = {CONFIG, *weights.files, *map(str, source.files), *([INDEX] if weights.index is not None else [])}
    copied = sum((source.folder / file).stat().st_size for file in source.files)
    return Plan(
        source=source.name,
        destination=str(dst),
        model_type=source.config.model_type,
        scheme=scheme,
        parameters=weights.parameters,
        added=added,
        added_parameters=sum(torch.Size(new[name].shape).numel() for name in added),
        changed=tuple(name for name in new if name in weights),
        removed=tuple(sorted(name for name in weights.stored if name not in tensors)),
        files=tuple(str(file) for file in source.files if file != Path(CARD)),
        left=tuple(sorted(p.name for p in source.folder.iterdir() if p.is_file() and p.name not in taken)),
        size=sum(tensor.nbytes for tensor in tensors.values()) + copied,
        unread=source.unread,
        unused=unused,
        written=tuple(_written(source, options)),
    )


def _written(source: Source, options: Options) -> Iterator[str]:
    """Yield the names of the files that a conversion writes beside the weights."""
    yield CONFIG
    if options.standalone:
        yield CODE_FILE
    if options.method is not None:
        yield REPORT
    yield CARD
    if Path(CARD) in source.files and not is_generated_card(source.folder / CARD):
        yield f"{KEPT_CARD} (the source's {CARD})"


def converted_config(source: Source, scheme: Scheme) -> Any:
    """Return the config of the converted model."""
    config = patched_config(source.config, scheme)
    config.architectures = [f"{PREFIX}{source.model_class.__name__}"]
    vars(config).pop("auto_map", None)  # it names code of the original model
    return config


def _stored_layers(source: Source, scheme: Scheme) -> Iterator[tuple[str, str, QKNormAttention]]:
    """Yield the stored names of each patched layer and of the norm before it, and the layer on the meta device."""
    with torch.device("meta"):
        model: Any = derived_model(source.model_class)(converted_config(source, scheme))
    for name, layer in patched_layers(model).items():
        prefix = source.stored_name(model, name)
        yield prefix, f"{prefix.rpartition('.')[0]}.{layer.family.pre_norm}", layer


def new_tensors(source: Source, options: Options) -> tuple[dict[str, NewTensor], dict[str, StoredTensor | NewTensor]]:
    """Return the tensors that a conversion adds or changes, with their values before a calibration, and all tensors."""
    scheme, weights = options.scheme, source.weights
    new: dict[str, NewTensor] = {}
    kept: dict[str, StoredTensor | NewTensor] = {**weights.stored}
    if not scheme.norms and scheme.pre_norm:
        return new, kept  # a cap has no tensors
    for prefix, pre_norm, layer in _stored_layers(source, scheme):
        projections = [f"{prefix}.{part}" for part in layer.family.style.weights]
        file, dtype = weights.stored[f"{projections[0]}.weight"].file, weights.dtype(f"{projections[0]}.weight")
        for norm_name, norm in head_norms(layer).items():
            for kind, parameter in norm.named_parameters():
                shape = tuple(parameter.shape)
                make = partial(torch.full, shape, norm.initial_gain if kind == "weight" else 0.0)
                new[f"{prefix}.{norm_name}.{kind}"] = NewTensor(file, shape, dtype, make)
            new[f"{prefix}.{norm_name}.knee"] = NewTensor(file, (3,), dtype, partial(torch.tensor, PLAIN))
        if not scheme.pre_norm:
            for kind in ("weight", "bias"):
                kept.pop(f"{pre_norm}.{kind}", None)
            for part, projection in zip(layer.family.style.weights, projections, strict=True):
                key, transposed = f"{projection}.weight", isinstance(layer.get_submodule(part), Conv1D)
                folded = partial(_folded, weights, key, pre_norm, layer, transposed)
                new[key] = replace(_as_stored(weights, key), make=folded)
                bias = f"{projection}.bias"
                if options.changes_projections and bias in weights:
                    new[bias] = _as_stored(weights, bias)
    return new, kept | new


def _as_stored(weights: Weights, key: str) -> NewTensor:
    stored = weights.stored[key]
    return NewTensor(stored.file, stored.shape, weights.dtype(key), partial(weights.read, key))


def _folded(weights: Weights, key: str, pre_norm: str, layer: QKNormAttention, transposed: bool) -> Tensor:
    return fold_weight(weights.read(key), weights.read(f"{pre_norm}.weight"), layer.family, transposed=transposed)


def check_exact_fold(source: Source, scheme: Scheme) -> None:
    """Raise ValueError for a bias that `pre_norm=False` can't fold without a calibration."""
    for prefix, pre_norm, layer in _stored_layers(source, scheme):
        for key in (f"{pre_norm}.bias", *(f"{prefix}.{part}.bias" for part in layer.family.style.weights)):
            if key in source.weights and bool(source.weights.read(key).any()):
                raise ValueError(
                    f"pre_norm=False can't fold {key} exactly: the right value depends on the text that the model "
                    "sees. Pass calibration= (--calibrate)"
                )
