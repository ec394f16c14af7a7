"""The machine as `hf-qknorm doctor` reports it: devices, compilers, which attention runs, and its numbers."""

from __future__ import annotations

import copy
import logging
import os
import platform
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from hf_qknorm.backends.calls import why_not_kernels
from hf_qknorm.backends.functions import why_tiled
from hf_qknorm.patch import patch_model
from hf_qknorm.scheme import Scheme
from hf_qknorm_command.findings import Finding

UNTESTED_DEVICE: Final = "the tests have run on CPUs alone, never on such a device"
UNTESTED_KERNELS: Final = "the fused kernels: the tests have run them in Triton's interpreter alone, never on a GPU"
TOKENS, VOCABULARY = 200, 64  # of the self-check
CHECKED: Final = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16)}


def find_machine() -> Iterator[Finding]:
    """Yield the findings about the machine, quick ones first; the last one checks the attention's numbers."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield from _devices()
    yield from _compilers()
    yield from _attention(device)
    yield check_attention(device)


def _devices() -> Iterator[Finding]:
    yield Finding("CPU", f"{platform.machine()}, {os.cpu_count()} cores; torch uses {torch.get_num_threads()} threads")
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        built = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        text = f"{found.name}, compute capability {found.major}.{found.minor}, {found.total_memory / 2**30:.0f} GiB"
        yield Finding(f"GPU {number}", f"{text}, {built}: {UNTESTED_DEVICE}", "note")
    if not torch.cuda.is_available():
        other = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        none = "none, and this torch is built without CUDA" if torch.version.cuda is None else "none that torch can use"
        yield Finding("GPU", none) if other is None else Finding(other.type, UNTESTED_DEVICE, "note")


def _compilers() -> Iterator[Finding]:
    if find_spec("triton") is None:
        yield Finding("Triton", "not installed, and so there are no fused kernels")
    else:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        yield Finding(
            "Triton", "interprets kernels (TRITON_INTERPRET=1)" if interpreted else "compiles kernels, for GPUs"
        )
    names = (os.environ.get("CXX"), "c++", "g++", "clang++", "cl")
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    yield Finding("C++ compiler", f"{compiler or 'none'} (for torch.compile on a CPU, and for Triton)")


def _attention(device: torch.device) -> Iterator[Finding]:
    """Which implementation serves a capped model on the device, as the attention functions select it."""
    q = torch.zeros(1, 4, 16, 64, dtype=torch.bfloat16, device=device)
    reason = why_tiled(q, q, q, None)
    yield Finding("hf_qknorm", "runs its fused kernels" if reason is None else f"runs tiled in PyTorch: {reason}")
    reason = why_not_kernels(q, q, q, None)
    yield Finding("hf_qknorm_triton", "runs" if reason is None else f"can't run here: {reason}")
    if device.type == "cuda" and reason is None:
        yield Finding("untested", UNTESTED_KERNELS, "note")


def check_attention(device: torch.device) -> Finding:
    """Compare a small patched model's logits and gradients in each dtype with the specification's, in fp64.

    A dtype passes if the relative error is at most twice that of the specification in the same dtype, plus a rounding.
    """
    texts, right = [], True
    for dtype in CHECKED[device.type]:
        try:
            error, allowed = attention_error(device, dtype)
        except Exception as failure:  # drivers and compilers raise anything
            text = f"attention fails in {dtype} on {device}: {type(failure).__name__}: {failure}"
            return Finding("self-check", " ".join(text.split()), "problem")
        texts.append(f"{error:.1e} in {str(dtype).removeprefix('torch.')} ({allowed:.1e} is allowed)")
        right &= error <= allowed  # NaN is not
    text = f"{'passed' if right else 'wrong numbers'} on {device}: relative error {', '.join(texts)}"
    return Finding("self-check", text, "ok" if right else "problem")


def attention_error(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """The relative error of a model with `hf_qknorm` attention on the device, and the error that is allowed."""
    exact = _small_model().to(dtype)
    ids = torch.arange(2 * TOKENS).view(2, TOKENS) * 7 % VOCABULARY
    rounded = {name: copy.deepcopy(exact).to(device) for name in ("hf_qknorm", "hf_qknorm_eager")}
    expected = _numbers(exact.double(), "hf_qknorm_eager", ids)
    errors = []
    for name, model in rounded.items():
        pairs = zip(_numbers(model, name, ids.to(device)), expected, strict=True)
        errors.append(max(float((x.double().cpu() - y).norm() / y.norm()) for x, y in pairs))
    return errors[0], 2 * errors[1] + torch.finfo(dtype).eps


def _small_model() -> Any:
    """A patched Llama of one layer on the CPU: grouped queries, head_dim 64, and a cap that bends the logits."""
    from transformers import LlamaConfig, LlamaForCausalLM  # slow to import

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=TOKENS, initializer_range=0.1,
    )  # fmt: skip
    logger = logging.getLogger("hf_qknorm")
    level = logger.level
    logger.setLevel(logging.ERROR)  # fresh gains are as good as any here
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return patch_model(LlamaForCausalLM(config), Scheme(q="rms", k="rms", softcap=5.0))
    finally:
        logger.setLevel(level)


def _numbers(model: Any, attention: str, ids: Tensor) -> list[Tensor]:
    """The logits, and the gradients of the attention layer's parameters."""
    model.set_attn_implementation(attention)
    found = model(input_ids=ids, labels=ids)
    found.loss.backward()
    return [found.logits.detach(), *(p.grad for p in model.model.layers[0].self_attn.parameters())]
