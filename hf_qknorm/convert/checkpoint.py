"""`convert_checkpoint`: a checkpoint on the disk or the Hub converted to a scheme, written atomically.

The weights are rewritten shard by shard; a model is built only for a calibration.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_qknorm.calibration.calibrate import MAX_TOKENS, calibrate
from hf_qknorm.calibration.checks import check_inputs, predicts_masked
from hf_qknorm.calibration.options import Knee, exported_eps
from hf_qknorm.checkpoint.config import check_readable
from hf_qknorm.checkpoint.copied_files import copy_files
from hf_qknorm.checkpoint.destinations import check_folder, check_new
from hf_qknorm.checkpoint.memory import SEQUENCES, memory_left, place_weights
from hf_qknorm.checkpoint.pretrained import load_tokenizer
from hf_qknorm.checkpoint.safetensors_files import Weights
from hf_qknorm.checkpoint.source import Source, open_source
from hf_qknorm.convert.plan import Options, Plan, check_exact_fold, converted_config, make_plan, new_tensors
from hf_qknorm.families import check_scheme, family_of
from hf_qknorm.families.class_names import TYPE_PREFIX
from hf_qknorm.files.atomic_io import new_folder
from hf_qknorm.files.hub_names import hub_name
from hf_qknorm.files.names import CARD, CONFIG, KEPT_CARD, REPORT
from hf_qknorm.files.paths import check_space, user_path
from hf_qknorm.hub.card import write_card
from hf_qknorm.measure.distributed import Batches
from hf_qknorm.measure.predictions import require_causal
from hf_qknorm.measure.regroup import regrouped
from hf_qknorm.measure.text import as_batches, check_batches, check_text, longest_sequence, sequence_length
from hf_qknorm.model.attention import head_norms, patched_layers
from hf_qknorm.model.record import own_tensors, sample_all
from hf_qknorm.patch import patch_model
from hf_qknorm.reports.report import Calibration
from hf_qknorm.scheme import Scheme
from hf_qknorm.standalone.generate import check_standalone, set_auto_map

logger = logging.getLogger("hf_qknorm")
PLANNED_TOKENS = 4096  # of a text, to try it


def plan_conversion(
    src: str | Path,
    dst: str | Path,
    scheme: Scheme | str | Mapping[str, Any] = "qk_norm_cap",
    *,
    calibration: Any = None,
    method: str | None = None,
    knee: Knee | None = None,
    length: int | None = None,
    standalone: bool = True,
    exportable: bool = False,
    overwrite: bool = False,
    allow_pickle: bool = False,
) -> Plan:
    """Return the plan of `convert_checkpoint` with these arguments.

    Nothing is written, and of the weights only headers are read. Raises the errors of `convert_checkpoint`
    that come before it reads weights. `calibration` is tried if it is the source of a text.

    >>> print(qk.plan_conversion("llama", "converted", "qk_norm"))  # doctest: +ELLIPSIS
    source      llama (llama, ... parameters)
    destination converted (qknorm_llama, ... MB)
    scheme      q=rms, k=rms
    adds        ... parameters: ... tensors, first model.layers.0.self_attn.q_norm.weight
    ...
    """
    destination = user_path(dst, "dst")
    check_new(destination, overwrite=overwrite)
    options = Options(Scheme.of(scheme), method, knee, length=length, standalone=standalone, exportable=exportable)
    options = options.checked(calibration)
    with _open_convertible(src, options, allow_pickle) as (source, options):
        check_folder(destination, overwrite=overwrite, sources=[source.folder, calibration])
        if isinstance(calibration, str | Path):  # an iterator would be used up
            _batches(source, options, calibration, PLANNED_TOKENS)
        return make_plan(source, destination, options)


def convert_checkpoint(
    src: str | Path,
    dst: str | Path,
    scheme: Scheme | str | Mapping[str, Any] = "qk_norm_cap",
    *,
    calibration: Any = None,
    method: str | None = None,
    knee: Knee | None = None,
    max_loss_increase: float | None = None,
    length: int | None = None,
    max_tokens: int | None = None,
    max_memory: int | str | None = None,
    standalone: bool = True,
    exportable: bool = False,
    overwrite: bool = False,
    allow_pickle: bool = False,
) -> Calibration | None:
    """Convert the checkpoint `src` (a folder or a Hub name) to `scheme`, into the new folder `dst`.

    With `calibration` (texts or batches, as for `calibrate`) the model is loaded and calibrated with `method`, `knee`
    and `exportable`; the report is returned, and saved beside the weights. Without it gains are fresh, and no model is
    built.
    Texts are cut into sequences of `length` tokens, by default 256, or half of learned positions, and used up to
    `max_tokens`, by default 262,144.
    `max_memory` limits the memory of the process, in bytes or as "8GB"; default: what machine, cgroups and process
    limits leave. Layers that do not fit are read from the disk in each forward pass, of up to 64 sequences then.

    Tokenizer, generation config, templates and licence are copied. A model card is written; the source's is kept as
    README.original.md. `standalone` adds the code that runs the model without hf_qknorm, as `add_standalone` does.
    `dst` appears once it is complete. With `overwrite` an existing folder is replaced if it holds a checkpoint and
    nothing else. Pickled weights are read with `allow_pickle` alone.

    Raises ValueError, naming the file, for a source, scheme or tokenizer that can't be converted, for a model whose
    stand-alone code can't be made, for too little text or memory, for an argument of the calibration without one, and
    for a loss that rises by more than `max_loss_increase` nats; FileExistsError for a destination that may not be
    replaced, is the working directory, or holds the source or the text; OSError, naming the file or checkpoint, for a
    failed read, write or download. After an error nothing is written.

    >>> report = qk.convert_checkpoint("llama", "converted", "qk_norm", calibration=texts, method="moments")
    >>> report.scheme.q
    'rms'
    """
    options = Options(
        Scheme.of(scheme), method, knee, max_loss_increase, length, max_tokens, max_memory, standalone, exportable
    )
    options = options.checked(calibration)
    if isinstance(calibration, str | Path):
        check_text(str(calibration))
    destination = user_path(dst, "dst")
    check_new(destination, overwrite=overwrite)
    with _open_convertible(src, options, allow_pickle) as (source, options):
        check = partial(check_folder, destination, overwrite=overwrite, sources=[source.folder, calibration])
        check()
        check_space(destination, make_plan(source, destination, options).size, str(destination))
        report: Calibration | None = None
        values: dict[str, Tensor] = {}
        if calibration is not None:
            report, values, names = _calibrate(source, options, calibration, destination)
            options = replace(options, scheme=report.scheme)
        new, tensors = new_tensors(source, options)
        tensors |= {name: replace(new[name], make=value.detach) for name, value in values.items()}
        with new_folder(destination, check) as folder:
            copy_files(source.folder, source.files, folder)
            config = converted_config(source, options.scheme)
            if options.standalone:
                set_auto_map(config)
            config.save_pretrained(folder)
            check_readable(folder, source.folder)
            source.weights.rewrite(folder, tensors)
            written = Weights(folder)  # checks the files
            if report is not None:
                samples = sample_all({name: written.mapped(name) for name in names if name in written})
                report = replace(report, weights=samples)
                report.save(folder / REPORT)
            _write_card(folder, source)
            source.check_unchanged()
        return report


@contextmanager
def _open_convertible(src: str | Path, options: Options, allow_pickle: bool) -> Iterator[tuple[Source, Options]]:
    """Open a source, refuse what can't be converted, and yield it with the scheme resolved for its family."""
    with open_source(src, allow_pickle=allow_pickle) as source:
        if getattr(source.config, "quantization_config", None) is not None:
            raise ValueError(
                f"{source.folder / CONFIG}: this checkpoint is quantised. Convert the one in full precision, then "
                "quantise that"
            )
        model_type = source.config.model_type
        if model_type.startswith(TYPE_PREFIX):
            raise ValueError(
                f"{source.name} is converted already ({source.config.scheme}): convert the original checkpoint "
                f"instead. Take the norms off one that was trained on: hf-qknorm export {source.name} DST --texts TEXT"
            )
        try:
            family_of(source.config)  # raises for a type that is not supported
            options = replace(options, scheme=options.scheme.resolve())
            sequence_length(source.config, options.length)
            check_scheme(model_type, source.config, options.scheme)
            if options.exportable:
                exported_eps(converted_config(source, options.scheme))
        except ValueError as error:
            raise ValueError(f"{source.folder / CONFIG}: {error}") from error
        source.check_complete()
        if not options.scheme.pre_norm and options.method is None:
            check_exact_fold(source, options.scheme)
        if options.standalone:
            check_standalone(model_type, options.scheme)
        yield source, options


def _write_card(folder: Path, source: Source) -> None:
    """Write the card of the converted model. A card of the source that can't be read is kept, with a warning."""
    base_model = hub_name(source.name)
    try:
        write_card(folder, base_model=base_model)
    except ValueError as error:
        if not (folder / CARD).is_file():
            raise
        (folder / CARD).rename(folder / KEPT_CARD)
        problem = str(error).replace(str(folder), str(source.folder))
        logger.warning("%s. The new card lacks the licence and other fields of %s", problem, KEPT_CARD)
        write_card(folder, base_model=base_model)


def _calibrate(
    source: Source, options: Options, calibration: Any, destination: Path
) -> tuple[Calibration, dict[str, Tensor], list[str], Any]:
    """Load, patch and calibrate the model.

    Returns the report, the new or changed values by their stored names, the names of the model's tensors, and the
    powers behind its knee.
    """
    batches = _batches(source, options, calibration, options.max_tokens or MAX_TOKENS)
    memory = memory_left(options.max_memory)
    with place_weights(source, longest_sequence(batches), memory, destination) as (placement, sequences):
        if sequences is not None:
            batches = regrouped(batches, sequences)
        loading = {"config": copy.deepcopy(source.config), "dtype": "auto", "use_safetensors": True, **placement}
        model = source.model_class.from_pretrained(source.weights.folder, **loading)
        model.name_or_path = ""  # without a name, patch_model does not warn that the model needs a calibration
        patch_model(model, options.scheme)
        model.name_or_path = str(source.folder)  # for the tokenizer
        limit = options.max_loss_increase
        chosen: dict[str, Any] = {"knee": options.knee, "max_loss_increase": limit, "exportable": options.exportable}
        report = calibrate(model, batches, options.method, **chosen)
        dataset = hub_name(calibration) if isinstance(calibration, str) else None
        report = replace(report, base_model=hub_name(source.name), dataset=dataset)
        return report, _changed_values(source, options, model), [*own_tensors(model)]


def _batches(source: Source, options: Options, calibration: Any, max_tokens: int) -> Batches:
    """Return the batches of a calibration. Raises ValueError for ones that the model can't be calibrated on."""
    if source.config.is_encoder_decoder:
        require_causal(source.config)
    with torch.device("meta"):
        model = source.model_class(copy.deepcopy(source.config))
    cut = {"batch": SEQUENCES, "length": sequence_length(source.config, options.length), "max_tokens": max_tokens}
    labels = predicts_masked(model)
    batches = list(as_batches(calibration, partial(load_tokenizer, source.folder), labels=labels, **cut))
    check_batches(batches, source.config)
    check_inputs(model, batches)
    return batches


def _changed_values(source: Source, options: Options, model: Any) -> dict[str, Tensor]:
    """Return gains, biases and ε, and the projections' weights if those changed, by their stored names."""
    values: dict[str, Tensor] = {}
    for name, layer in patched_layers(model).items():
        parts = [*head_norms(layer), *(layer.family.style.weights if options.changes_projections else ())]
        prefix = source.stored_name(model, name) if parts else ""
        for part in parts:
            module = layer.get_submodule(part)
            for kind, tensor in module.state_dict().items():
                values[f"{prefix}.{part}.{kind}"] = tensor
    return values
