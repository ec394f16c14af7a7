"""Models and tokenizers that others trained, loaded for a look or a start: from safetensors alone, no code run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_qknorm.convert.complete import check_complete
from hf_qknorm.convert.source import Source


def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer in a folder, or of a Hub name. Raises OSError or ValueError, naming it, where there is none."""
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:  # transformers' messages go on for paragraphs
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"{name}: no tokenizer can be loaded: {str(error).strip().splitlines()[0]}") from error


def load_causal(source: Source, dtype: torch.dtype | str) -> Any:
    """The causal language model of a checkpoint. Raises ValueError unless all its weights are there, and stay as is."""
    model_class = AutoModelForCausalLM._model_mapping[type(source.config)]
    check_complete(model_class, source.config, source.weights.stored, source.weights.folder)
    model = AutoModelForCausalLM.from_pretrained(
        source.weights.folder, dtype=dtype, use_safetensors=True, trust_remote_code=False
    )
    source.check_unchanged()
    model.name_or_path = source.name
    return model
