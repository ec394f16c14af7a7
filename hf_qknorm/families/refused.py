"""The reasons why the model types that have no line in `FAMILIES` can't be patched, or take a cap alone."""

from __future__ import annotations

from typing import Final

INLINE: Final = "it computes attention in its own module, and not by transformers' attention functions"

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
    "an indexer with projections of its own selects the keys that each query sees": (
        "axk2 deepseek_v32 deepseek_v4 dots3_note_text glm_moe_dsa hy_v4 minimax_m3_vl_text qwen4_exp_text"
    ),
    INLINE: (
        "big_bird falcon git gpt_neo gpt_neox_japanese megatron-bert mvp openai-gpt rembert roformer trocr xglm xlm"
    ),
    f"{INLINE}, and adds a bias by position (ALiBi) to its logits": "bloom mpt",
    "each layer computes attention twice and takes the difference": "diffllama",
    "experts project its queries, several for each key head": "jetmoe",
    "its attention hashes the tokens, and attends within buckets and chunks": "reformer",
    "its attention is relative, and runs over two streams": "xlnet",
}

# As above, of types that take a cap alone.
_NORMS: Final[dict[str, str]] = {
    "it adds a learned bias by position to its logits, which servers and fused kernels do not take": "mt5 t5",
    "its windows reach both ways, and attention functions differ in where such a window ends": "modernbert",
    "its attention module has another form before transformers 5.24": "dinov2 dinov2_with_registers",
    f"before transformers 5.24 {INLINE}": "codegen gptj",
}

NORMS_REFUSED: Final = {model_type: reason for reason, types in _NORMS.items() for model_type in types.split()}
REFUSED: Final = {model_type: reason for reason, types in _TYPES.items() for model_type in types.split()}

# Multimodal types that AutoModelForCausalLM loads whole: their text tower is patched, which is a family of its own.
BY_TOWER: Final = ("fuyu", "got_ocr2", "moss_transcribe_diarize")
