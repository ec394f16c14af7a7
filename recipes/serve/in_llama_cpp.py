"""Run in llama.cpp's environment by serve_llama_cpp.py: quantise a GGUF, and score sequences of tokens.

The library is in xllamacpp's wheel, which exports llama.h and ggml.h; llama-cpp-py-sync has the declarations.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import xllamacpp
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from llama_cpp_py_sync._cffi_bindings import get_ffi

# By format: the types of matrices and of the token embeddings, and of those whose rows are no multiple of 256, as
# llama-quantize chooses them. (It gives some matrices of Q4_K_M six bits, and here none.)
FORMATS = {
    "Q8_0": (Type.Q8_0, Type.Q8_0, Type.Q8_0, Type.Q8_0),
    "Q6_K": (Type.Q6_K, Type.Q8_0, Type.Q6_K, Type.Q8_0),
    "Q4_K": (Type.Q4_K, Type.Q5_0, Type.Q6_K, Type.Q8_0),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf", type=Path)
    parser.add_argument("sequences", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    sequences = json.loads(options.sequences.read_text())
    ffi = get_ffi()
    ffi.cdef("size_t ggml_quantize_chunk(int, const float *, void *, int64_t, int64_t, int64_t, const float *);")
    lib = ffi.dlopen(str(next(Path(xllamacpp.__file__).parent.glob("*.so"))))
    lib.llama_backend_init()
    losses = {"f16": mean_loss(lib, ffi, options.gguf, sequences)}
    for name in FORMATS:
        made = options.gguf.with_suffix(f".{name}.gguf")
        quantise(lib, ffi, options.gguf, made, name)
        losses[name] = mean_loss(lib, ffi, made, sequences)
        made.unlink()
    options.out.write_text(json.dumps({"losses": losses, "version": f"xllamacpp {version('xllamacpp')}"}))


def quantise(lib, ffi, source: Path, made: Path, name: str) -> None:
    """Write a GGUF with the matrices of another in a format."""
    reader = GGUFReader(source)
    writer = GGUFWriter(made, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kinds = field.types
            sub = kinds[-1] if kinds[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kinds[0], sub_type=sub)
    for tensor in reader.tensors:
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        x = np.ascontiguousarray(tensor.data, np.float32)
        kind = FORMATS[name][2 * tensor.name.startswith("token_embd") + (x.shape[1] % 256 > 0)]
        raw = np.zeros(x.nbytes, np.uint8)
        given, out = ffi.cast("float *", x.ctypes.data), ffi.cast("void *", raw.ctypes.data)
        size = lib.ggml_quantize_chunk(int(kind), given, out, 0, *x.shape, ffi.NULL)
        writer.add_tensor(tensor.name, raw[:size].reshape(x.shape[0], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
