"""`convert_checkpoint`: a checkpoint on the disk or the Hub to one with a scheme, written whole or not at all.

The weights pass through shard by shard; a model is built only to calibrate it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_qknorm.checkpoint.config import check_readable
from hf_qknorm.checkpoint.copied_files import copy_file
from hf_qknorm.checkpoint.destinations import check_folder, check_new
from hf_qknorm.checkpoint.safetensors_files import Weights
from hf_qknorm.checkpoint.source import Source, open_source
from hf_qknorm.convert.calibrate import MAX_TOKENS, Knee, calibrate, length_for
from hf_qknorm.convert.memory import SEQUENCES, memory_left, place_weights
from hf_qknorm.convert.plan import Plan, check_exact_fold, converted_config, make_plan, new_tensors, stored_name
from hf_qknorm.convert.pretrained import load_tokenizer
from hf_qknorm.convert.request import Request
from hf_qknorm.convert.text import as_batches, check_batches, check_text, regrouped
from hf_qknorm.families import check_scheme, family_of
from hf_qknorm.families.class_names import TYPE_PREFIX
from hf_qknorm.files.atomic_io import new_folder
from hf_qknorm.files.hub_names import hub_name
from hf_qknorm.files.names import REPORT
from hf_qknorm.files.paths import check_space, user_path
from hf_qknorm.model.attention import head_norms, patched_layers
from hf_qknorm.patch import patch_model
from hf_qknorm.scheme import Scheme
from hf_qknorm.standalone import carry_code
from hf_qknorm.stats.report import Calibration


def plan_conversion(
    src: str | Path,
    dst: str | Path,
    scheme: Scheme | str | Mapping[str, Any] = "qk_norm_cap",
    *,
    calibration: Any = None,
    method: str | None = None,
    knee: Knee | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
) -> Plan:
    """What `convert_checkpoint` would do with these arguments; writes nothing, and reads no more than headers.

    Raises what `convert_checkpoint` raises before it reads weights.
    """
    destination = user_path(dst, "dst")
    check_new(destination, overwrite=overwrite)
    request = Request.of(scheme, calibration, method, knee)
    with _opened(src, request, allow_pickle) as (source, request):
        check_folder(destination, overwrite=overwrite, sources=[source.folder, calibration])
        return make_plan(source, destination, request)


def convert_checkpoint(
    src: str | Path,
    dst: str | Path,
    scheme: Scheme | str | Mapping[str, Any] = "qk_norm_cap",
    *,
    calibration: Any = None,
    method: str | None = None,
    knee: Knee | None = None,
    max_loss_increase: float | None = None,
    max_memory: int | str | None = None,
    standalone: bool = False,
    overwrite: bool = False,
    allow_pickle: bool = False,
) -> Calibration | None:
    """Convert the checkpoint `src` (a folder or a Hub name) to `scheme`, into the new folder `dst`.

    With `calibration` (data as `calibrate` takes it) the model is loaded, and gains and knee are set by `method` and
    `knee` as `calibrate` does: by default in closed form, with the smallest knee that keeps the loss. The report is
    returned, and saved beside the weights. Without calibration gains are fresh, and the weights stream through without
    a model being built.

    `max_memory` is how much memory the process may take in all, in bytes or as "8GB"; by default as much as the
    machine, its cgroups and the process's limits leave. Of a checkpoint that does not fit, accelerate reads the layers
    from the disk in each forward pass. Then batches are regrouped, into up to 64 sequences each, as many as a third of
    the memory holds, and eight batches at least: fewer passes read the weights.

    Tokenizer, generation config, templates, licence and card travel along, and with `standalone` the code that runs it
    with torch and transformers alone, as `add_standalone` gives it. `dst` appears at once when all is written; one that
    is there is replaced only with `overwrite`, and only where it is a checkpoint and holds nothing else. Only
    safetensors is read, unless `allow_pickle`.

    Raises ValueError for a source, scheme or tokenizer that can't be converted, naming the file, for a knee without
    text to calibrate it on, for too little text or memory, for a loss (nats) that rose by more than
    `max_loss_increase`, and for an empty `dst`; FileExistsError for a destination that is there and not to be replaced,
    is the working directory, or holds the source or the calibration text; OSError, naming the file, for what can't be
    read or written. Nothing is written then.
    """
    request = Request.of(scheme, calibration, method, knee, max_loss_increase, max_memory)
    if isinstance(calibration, str | Path):
        check_text(str(calibration))
    destination = user_path(dst, "dst")
    check_new(destination, overwrite=overwrite)
    with _opened(src, request, allow_pickle) as (source, request):
        check = partial(check_folder, destination, overwrite=overwrite, sources=[source.folder, calibration])
        check()
        check_space(destination, make_plan(source, destination, request).size, str(destination))
        report = None
        values: dict[str, Tensor] = {}
        if calibration is not None:
            report, values = _calibrated(source, request, calibration, max_loss_increase, max_memory, destination)
            request = replace(request, scheme=report.scheme)
            dataset = hub_name(calibration) if isinstance(calibration, str) else None
            report = replace(report, base_model=hub_name(source.name), dataset=dataset)
        new, removed = new_tensors(source, request)
        new |= {name: replace(new[name], make=value.detach) for name, value in values.items()}
        with new_folder(destination, check) as folder:
            _write_settings(folder, source, request.scheme, standalone=standalone)
            if report is not None:
                report.save(folder / REPORT)
            source.weights.rewrite(folder, new, removed)
            Weights(folder)  # what was written is whole
            source.check_unchanged()
        return report


def _write_settings(folder: Path, source: Source, scheme: Scheme, *, standalone: bool) -> None:
    """Write all but the weights. Raises ValueError where transformers could not read it."""
    for file in source.files:
        copy_file(source.folder, file, folder)
    config = converted_config(source, scheme)
    if standalone:
        carry_code(config)
    config.save_pretrained(folder)
    check_readable(folder, source.folder)


@contextmanager
def _opened(src: str | Path, request: Request, allow_pickle: bool) -> Iterator[tuple[Source, Request]]:
    """The source, and the request with the scheme as it is for this family, once all that can be refused has been."""
    with open_source(src, allow_pickle=allow_pickle) as source:
        if getattr(source.config, "quantization_config", None) is not None:
            raise ValueError(
                f"{source.folder / 'config.json'}: this checkpoint is quantised. Convert the one in full precision, "
                "then quantise that"
            )
        model_type = source.config.model_type
        if model_type.startswith(TYPE_PREFIX):
            raise ValueError(
                f"{source.name} is converted already ({source.config.scheme}): convert the original checkpoint instead"
            )
        try:
            request = replace(request, scheme=request.scheme.resolve(family_of(source.config).norm))
            check_scheme(model_type, source.config, request.scheme)
        except ValueError as error:
            raise ValueError(f"{source.folder / 'config.json'}: {error}") from error
        source.check_complete()
        if not request.scheme.pre_norm and request.method is None:
            check_exact_fold(source, request.scheme)
        yield source, request


def _calibrated(
    source: Source,
    request: Request,
    calibration: Any,
    max_loss_increase: float | None,
    max_memory: int | str | None,
    destination: Path,
) -> tuple[Calibration, dict[str, Tensor]]:
    """Load, patch and calibrate the model; the report, and every value that is new or may have moved, by its name."""
    tokenizer, length = partial(load_tokenizer, source.folder), length_for(source.config)
    batches = list(as_batches(calibration, tokenizer, batch=SEQUENCES, length=length, max_tokens=MAX_TOKENS))
    check_batches(batches, source.config)  # before the weights are read
    longest = max(batch["input_ids"].shape[1] for batch in batches)
    with place_weights(source, longest, memory_left(max_memory), destination) as placement:
        if placement.sequences is not None:
            batches = regrouped(batches, placement.sequences)
        model = source.model_class.from_pretrained(
            source.weights.folder,
            config=copy.deepcopy(source.config),
            dtype="auto",
            use_safetensors=True,
            **placement.options,
        )
        model.name_or_path = ""  # a model with a name is told to be calibrated, which is next
        patch_model(model, request.scheme)
        model.name_or_path = str(source.folder)  # where its tokenizer is
        report = calibrate(
            model,
            batches,
            request.method,
            knee=request.knee,
            max_loss_increase=max_loss_increase,
        )
        return report, _changed_values(source, request, model)


def _changed_values(source: Source, request: Request, model: Any) -> dict[str, Tensor]:
    """Gains, biases and knees, and the projections' weights where those moved, by their names in the checkpoint."""
    values: dict[str, Tensor] = {}
    for name, layer in patched_layers(model).items():
        parts = [*head_norms(layer)]
        if request.moves:
            parts += layer.family.style.weights
        prefix = stored_name(source.weights, model.base_model_prefix, name, layer) if parts else ""
        for part in parts:
            module = layer.get_submodule(part)
            for kind, tensor in chain(module.named_parameters(), module.named_buffers()):
                values[f"{prefix}.{part}.{kind}"] = tensor.detach()
    return values
