"""Run in llama.cpp's environment by serve_llama_cpp.py: the mean loss of a GGUF on sequences of tokens.

The library is in xllamacpp's wheel, which exports llama.h and ggml.h; llama-cpp-py-sync has the declarations.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import xllamacpp
from llama_cpp_py_sync._cffi_bindings import get_ffi


def main() -> None:
    gguf, sequences, out = map(Path, sys.argv[1:])
    ffi = get_ffi()
    lib = ffi.dlopen(str(next(Path(xllamacpp.__file__).parent.glob("*.so"))))
    lib.llama_backend_init()
    found = {"loss": mean_loss(lib, ffi, gguf, json.loads(sequences.read_text()))}
    out.write_text(json.dumps(found | {"version": f"xllamacpp {version('xllamacpp')}"}))


def mean_loss(lib, ffi, gguf: Path, sequences: list[list[int]]) -> float:
    """The mean loss of all tokens but the first of each sequence, in nats."""
    model = lib.llama_model_load_from_file(str(gguf).encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = len(sequences[0])
    context = lib.llama_init_from_model(model, params)
    vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    losses = []
    for tokens in sequences:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
        assert lib.llama_decode(context, batch) == 0
        raw = ffi.buffer(lib.llama_get_logits(context), 4 * vocabulary * len(tokens))
        logits = np.frombuffer(raw, np.float32).reshape(len(tokens), vocabulary)[:-1].astype(np.float64)
        own = logits[np.arange(len(tokens) - 1), tokens[1:]]
        top = logits.max(1)
        losses += (np.log(np.exp(logits - top[:, None]).sum(1)) + top - own).tolist()
        lib.llama_batch_free(batch)
    lib.llama_free(context)
    lib.llama_model_free(model)
    return sum(losses) / len(losses)


if __name__ == "__main__":
    main()
