"""New measurements of a patched model, for example after training, in place of those of its conversion."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from hf_qknorm.checkpoint import open_source
from hf_qknorm.convert.card import has_tokenizer
from hf_qknorm.files.hub_names import hub_name
from hf_qknorm.files.names import REPORT
from hf_qknorm.measure import text
from hf_qknorm.measure.batches import check_batches, count_tokens, longest_sequence
from hf_qknorm.measure.distributed import require_whole
from hf_qknorm.measure.logit_statistics import CAP
from hf_qknorm.measure.measured_checkpoint import loaded_with_text
from hf_qknorm.measure.predictions import evaluate, require_causal
from hf_qknorm.model.adapters import unwrap_peft
from hf_qknorm.model.configs import QKNormConfig
from hf_qknorm.model.derived import QKNormModel
from hf_qknorm.model.knees import NO_NORM, knee_of, sharpness_of
from hf_qknorm.model.record import record_of, set_record
from hf_qknorm.reports.report import MEASURED, Calibration


def remeasure(
    model: nn.Module,
    data: Any,
    *,
    tokenizer: Any = None,
    max_tokens: int = 16_384,
    batch_size: int = 8,
    length: int | None = None,
) -> Calibration:
    """Measure a patched model as it is on `data` (as for `calibrate`), and replace the report that it carries.

    The report has the loss, and logits, gains and bound of each layer, and no comparison with an unpatched model: the
    weights were trained with the scheme. Parameters are left as they are.

    Raises ValueError for a model that is not patched or has bidirectional attention, and for data with fewer than 16
    tokens to predict.
    """
    require_whole(model)
    bare = unwrap_peft(model)
    if not isinstance(bare, QKNormModel):
        raise ValueError(f"{type(bare).__name__} is not patched: call patch_model(model, scheme) first")
    require_causal(bare.config)
    batches = text.batches_for(bare, data, tokenizer, batch=batch_size, length=length, max_tokens=max_tokens)
    check_batches(batches, bare.config)
    cap = bare.config.attn_logit_softcapping or CAP
    training = bare.training
    bare.eval()
    try:
        found = evaluate(bare, batches, cap, compared=False)
    finally:
        bare.train(training)
    tokens = count_tokens(batches)
    report = Calibration(
        method=MEASURED,
        tokens=tokens,
        scheme=bare.config.scheme,
        cap=cap,
        base=None,
        ones=None,
        chosen=found.own,
        layers=found.layers,
        judged=tokens,
        base_model=(record_of(bare) or {}).get("base_model"),
        dataset=hub_name(data) if isinstance(data, str) else None,
        length=longest_sequence(batches),
        context=text.context_length(bare.config),
        knee=min(knee_of(bare), NO_NORM),
        sharpness=sharpness_of(bare),
    )
    set_record(bare, report.to_dict())
    return report


def remeasure_checkpoint(folder: Path, texts: str, *, tokens: int = 16_384, length: int | None = None) -> Calibration:
    """`remeasure` for the patched checkpoint in `folder`; write the report beside its weights, atomically.

    Raises, before the weights are read, FileNotFoundError for a folder, a tokenizer or a text that does not exist, and
    ValueError for broken weights, a model that is not patched, an impossible length, and too little text.
    """
    text.check_text(texts)
    source = open_source(folder)
    if not isinstance(source.config, QKNormConfig):
        raise ValueError(f"{folder} holds a plain {source.config.model_type}: convert it first (hf-qknorm convert)")
    if not has_tokenizer(source.folder):
        raise FileNotFoundError(
            f"{folder} has no tokenizer, which a measurement needs: save one there (tokenizer.save_pretrained)"
        )
    with loaded_with_text(source, texts, tokens, length) as (model, batches):
        report = replace(remeasure(model, batches, max_tokens=tokens), dataset=hub_name(texts))
    report.save(folder / REPORT)
    return report
