"""Loading of pretrained models and tokenizers: from safetensors alone, without running a checkpoint's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm.checkpoint.complete import check_complete
from hf_qknorm.checkpoint.config import check_readable
from hf_qknorm.checkpoint.source import Source
from hf_qknorm.files.names import CONFIG, INDEX
from hf_qknorm.model.config_checks import CAUSED, describe_error

OTHER_HEADS: Final = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def load_tokenizer(name: str | Path) -> Any:
    """Load the tokenizer of a folder or Hub name. Raises OSError or ValueError, naming it, if there is none."""
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:  # of transformers, whose messages have paragraphs
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"{name}: no tokenizer can be loaded: {' '.join(str(error).split())}") from error


def load_causal(source: Source, dtype: torch.dtype | str, **placement: Any) -> Any:
    """Load the causal language model of a checkpoint; `placement` are options of `from_pretrained`.

    Raises ValueError for a model with another head, missing weights, or files that change during the loading.
    """
    named = "".join((source.config.architectures or [])[:1])
    if named.endswith(OTHER_HEADS):
        raise ValueError(
            f"{source.folder / CONFIG}: the checkpoint is a {named}, which predicts no tokens to measure: give a "
            "causal language model (a card needs no text)"
        )
    model_class = AutoModelForCausalLM._model_mapping[type(source.config)]
    check_complete(model_class, source.config, source.weights.stored, source.weights.folder)
    check_readable(source.folder, source.folder)
    if source.weights.index is not None and "metadata" not in source.weights.index:
        raise ValueError(
            f'{source.weights.folder / INDEX} has no "metadata", without which transformers does not load it'
        )
    options = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True, **placement}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(source.weights.folder, dtype=dtype, **options)
    except (*CAUSED, ValueError) as error:
        if isinstance(error, RuntimeError) or "config.json" in str(error):
            raise  # not enough memory, for example, or the file is named already
        raise ValueError(f"{source.folder / CONFIG}: transformers can't load it ({describe_error(error)})") from error
    if missing := sorted(info["missing_keys"]):  # in a quantised model, which check_complete does not compare
        raise ValueError(
            f"{source.folder}: no weights for {missing[0]}, of {len(missing)} that the model of its config.json needs"
        )
    source.check_unchanged()
    model.name_or_path = source.name
    return model
