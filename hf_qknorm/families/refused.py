"""The reasons why the model types that have no line in `FAMILIES` can't be patched."""

from __future__ import annotations

from typing import Final

_NO_SOFTMAX: Final = "it has no softmax attention"
_DECODER: Final = "it is the decoder of an encoder-decoder, whose layers attend to an encoder too"
_MULTIMODAL: Final = (
    "it is multimodal: a tower of it is patched, if checkpoints of the whole model keep the patched tower"
)
_INDEXER: Final = "an indexer selects the keys of each query, and needs the model's own attention functions"
_BIAS: Final = "its attention adds a learned position bias, which other attention functions do not take"
_NO_INTERFACE: Final = "its attention module computes attention inline and calls no attention function"
_SHARED: Final = "its layers share keys and values, and a norm or cap would be applied to them twice"

REFUSED: Final[dict[str, str]] = {
    "axk2": _INDEXER,
    "bart": _DECODER,
    "big_bird": _NO_INTERFACE,
    "bigbird_pegasus": _DECODER,
    "blenderbot": _DECODER,
    "blenderbot-small": _DECODER,
    "bloom": _NO_INTERFACE,
    "blt": "its attention is of several kinds: within patches of bytes, between them, and across",
    "codegen": _NO_INTERFACE,
    "cpmant": _BIAS,
    "ctrl": "its attention module takes queries, keys and values as three inputs",
    "deepseek_v32": _INDEXER,
    "deepseek_v4": "its keys are compressed, and selected by an indexer",
    "diffllama": "each layer computes attention twice and takes the difference",
    "doge": "its attention has a learned mask, computed from the values",
    "dots3_note_text": _INDEXER,
    "emu3": _MULTIMODAL,
    "emu3_text_model": _MULTIMODAL,
    "falcon": _NO_INTERFACE,
    "falcon_mamba": _NO_SOFTMAX,
    "fuyu": _MULTIMODAL,
    "gemma3": _MULTIMODAL,
    "gemma3n": _MULTIMODAL,
    "gemma4": _MULTIMODAL,
    "gemma4_assistant": _SHARED,
    "gemma4_unified": _MULTIMODAL,
    "gemma4_unified_assistant": _SHARED,
    "git": _MULTIMODAL,
    "glm_moe_dsa": _INDEXER,
    "got_ocr2": _MULTIMODAL,
    "gpt_neo": _NO_INTERFACE,
    "gpt_neox_japanese": _NO_INTERFACE,
    "gptj": _NO_INTERFACE,
    "hy_v4": _INDEXER,
    "inkling2_text": _BIAS,
    "inkling_text": _BIAS,
    "jetmoe": "experts project its queries, several for each key head",
    "mamba": _NO_SOFTMAX,
    "mamba2": _NO_SOFTMAX,
    "marian": _DECODER,
    "mbart": _DECODER,
    "megatron-bert": _NO_INTERFACE,
    "minimax_m3_vl_text": _INDEXER,
    "mllama": _MULTIMODAL,
    "mllama_text_model": _MULTIMODAL,
    "moshi": "its depth decoder selects projections by codebook",
    "moss_transcribe_diarize": _MULTIMODAL,
    "mpt": _NO_INTERFACE,
    "musicgen": _DECODER,
    "musicgen_melody": _DECODER,
    "mvp": _DECODER,
    "openai-gpt": _NO_INTERFACE,
    "pegasus": _DECODER,
    "phi4_multimodal": _MULTIMODAL,
    "plbart": _DECODER,
    "prophetnet": _DECODER,
    "qwen4_exp_text": _INDEXER,
    "reformer": "its attention hashes the tokens, and attends within buckets and chunks",
    "rembert": _NO_INTERFACE,
    "roformer": _NO_INTERFACE,
    "rwkv": _NO_SOFTMAX,
    "trocr": _DECODER,
    "whisper": _DECODER,
    "xglm": _NO_INTERFACE,
    "xlm": _NO_INTERFACE,
    "xlnet": "its attention is relative, and runs over two streams",
    "xlstm": _NO_SOFTMAX,
    "zaya": "a convolution with a state of its own projects its queries, keys and values",
}
