"""The reasons why the model types that have no line in `FAMILIES` can't be patched."""

from __future__ import annotations

from typing import Final

# Each reason, and the model types that it applies to.
_TYPES: Final[dict[str, str]] = {
    "its decoder attends to several streams of future tokens at once": "prophetnet",
    "its tokens attend to later ones, also in generation, so cached keys are wrong as soon as the text grows": "cpmant",
    "its sinks are computed from the input, and it clips the lengths of queries and keys": (
        "inkling2_loop_text inkling2_text"
    ),
    "its layers run several times over a text, and each run attends to cached keys of its own or of the last": "dory",
    "it is multimodal, and its config always builds the text config from transformers' own class, which loses a scheme "
    "without an error: patch the text model by itself": "gemma3 gemma3n gemma4 gemma4_unified",
    "it has no softmax attention": "falcon_mamba mamba mamba2 rwkv xlstm",
    "its layers share keys and values, and a norm or cap would be applied to them twice": (
        "gemma4_assistant gemma4_unified_assistant"
    ),
    "its attention is of several kinds: within patches of bytes, between them, and across": "blt",
    "its keys are compressed, and selected by an indexer": "deepseek_v4",
    "each layer computes attention twice and takes the difference": "diffllama",
    "experts project its queries, several for each key head": "jetmoe",
    "its attention hashes the tokens, and attends within buckets and chunks": "reformer",
    "its attention is relative, and runs over two streams": "xlnet",
}

REFUSED: Final = {model_type: reason for reason, types in _TYPES.items() for model_type in types.split()}

# Multimodal types that AutoModelForCausalLM loads whole: their text tower is patched, which is a family of its own.
BY_TOWER: Final = ("fuyu", "got_ocr2", "moss_transcribe_diarize")
