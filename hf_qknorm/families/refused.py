"""The reasons why the model types that have no line in `FAMILIES` can't be patched."""

from __future__ import annotations

from typing import Final

# Each reason, and the model types that it applies to.
_TYPES: Final[dict[str, str]] = {
    "an indexer selects the keys of each query, and needs the model's own attention functions": (
        "axk2 deepseek_v32 dots3_note_text glm_moe_dsa hy_v4 minimax_m3_vl_text qwen4_exp_text"
    ),
    "its decoder attends to several streams of future tokens at once": "prophetnet",
    "its decoder takes several codebooks of sound at once, for which there is no test here": (
        "musicgen musicgen_melody"
    ),
    "its attention module computes attention itself, with masks in a form for which there is no style": "xlm",
    "its attention adds a learned position bias, in a form for which there is no style here": (
        "cpmant inkling2_text inkling_text"
    ),
    "it is multimodal: a tower of it is patched, if checkpoints of the whole model keep the patched tower": (
        "emu3 emu3_text_model fuyu gemma3 gemma3n gemma4 gemma4_unified git got_ocr2 mllama mllama_text_model "
        "moss_transcribe_diarize phi4_multimodal"
    ),
    "it has no softmax attention": "falcon_mamba mamba mamba2 rwkv xlstm",
    "its layers share keys and values, and a norm or cap would be applied to them twice": (
        "gemma4_assistant gemma4_unified_assistant"
    ),
    "its attention is of several kinds: within patches of bytes, between them, and across": "blt",
    "its keys are compressed, and selected by an indexer": "deepseek_v4",
    "each layer computes attention twice and takes the difference": "diffllama",
    "its attention has a learned mask, computed from the values": "doge",
    "experts project its queries, several for each key head": "jetmoe",
    "its depth decoder selects projections by codebook": "moshi",
    "its attention hashes the tokens, and attends within buckets and chunks": "reformer",
    "its attention is relative, and runs over two streams": "xlnet",
    "a convolution with a state of its own projects its queries, keys and values": "zaya",
}

REFUSED: Final = {model_type: reason for reason, types in _TYPES.items() for model_type in types.split()}
