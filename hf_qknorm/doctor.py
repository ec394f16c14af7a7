"""The machine as `hf-qknorm doctor` reports it: devices, compilers, which attention runs, and its numbers."""

from __future__ import annotations

import copy
import os
import platform
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from hf_qknorm.attend.implementations import TRITON, Choice, choose
from hf_qknorm.ops import library
from hf_qknorm.ops.cpu import build
from hf_qknorm.ops.error_budget import Verdict, verdict
from hf_qknorm.ops.types import Call, Heads, Options, Visible
from hf_qknorm.patch import patch_model
from hf_qknorm.scheme import Scheme
from hf_qknorm_command.findings import Finding

UNTESTED_DEVICE: Final = "the tests have run on CPUs alone, never on such a device"
UNTESTED_KERNELS: Final = "the fused kernels: the tests have run them in Triton's interpreter and on an H100 alone"
TOKENS, VOCABULARY = 200, 64  # of the self-check
HEAD_DIMS: Final = (64, 128)
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
    wanted = os.environ.get("CXX", "").split()[:1]  # with arguments, as in "ccache g++"
    compiler = next(filter(None, map(shutil.which, wanted or ("c++", "g++", "clang++", "cl"))), None)
    yield Finding("C++ compiler", f"{compiler or 'none'} (for attention and torch.compile on a CPU, and for Triton)")


def _attention(device: torch.device) -> Iterator[Finding]:
    """Which implementation serves a capped model on the device, as the attention functions select it, and why."""
    try:
        chosen = {(dtype, d): _chosen(device, dtype, d) for dtype in CHECKED[device.type] for d in HEAD_DIMS}
    except (RuntimeError, ValueError) as failure:  # kernels that are demanded, and are not there
        yield Finding("hf_qknorm", " ".join(str(failure).split()), "problem")
        return
    calls: dict[str, list[str]] = {}
    for (dtype, head_dim), choice in chosen.items():
        calls.setdefault(f"runs {choice}", []).append(f"{str(dtype).removeprefix('torch.')} at head_dim {head_dim}")
    alike = len(calls) == 1
    text = "; ".join(found if alike else f"{found} ({', '.join(names)})" for found, names in calls.items())
    q = torch.zeros(1, 4, 16, 64, dtype=torch.bfloat16, device=device)
    reason = library.why_not_fused(Heads(q, q, q))
    failed = reason is None and any(choice.implementation is not TRITON for choice in chosen.values())
    yield Finding("hf_qknorm", text, "problem" if failed and device.type == "cuda" else "ok")
    yield Finding("hf_qknorm_triton", "runs" if reason is None else f"can't run here: {reason}")
    yield _cpu_kernels()
    if device.type == "cuda" and reason is None:
        yield Finding("untested", UNTESTED_KERNELS, "note")


def _cpu_kernels() -> Finding:
    """Whether the C++ kernels are there; they are compiled if they were not before."""
    reason = build.why_not()
    text = f"runs {build.name()}" if reason is None else f"can't run here: {' '.join(reason.split())}"
    return Finding("hf_qknorm_cpu", text, "ok" if reason is None else "note")


def _chosen(device: torch.device, dtype: torch.dtype, head_dim: int) -> Choice:
    """The implementation of a training step's attention."""
    q = torch.zeros(1, 4, TOKENS, head_dim, dtype=dtype, device=device, requires_grad=True)
    return choose(Call(Heads(q, q, q), Visible(), Options(head_dim**-0.5, 50.0, causal=True)))


def check_attention(device: torch.device) -> Finding:
    """Compare a small patched model's logits and gradients in each dtype with the specification's, in fp64.

    A dtype passes by the error budget of `ops/error_budget.py`.
    """
    texts, right = [], True
    for dtype in CHECKED[device.type]:
        try:
            error, budget = found = attention_error(device, dtype)
        except Exception as failure:  # drivers and compilers raise anything
            text = f"attention fails in {dtype} on {device}: {type(failure).__name__}: {failure}"
            return Finding("self-check", " ".join(text.split()), "problem")
        texts.append(f"{error:.1e} in {str(dtype).removeprefix('torch.')} ({budget:.1e} is allowed)")
        right &= found.passed
    text = f"{'passed' if right else 'wrong numbers'} on {device}: relative error {', '.join(texts)}"
    return Finding("self-check", text, "ok" if right else "problem")


def attention_error(device: torch.device, dtype: torch.dtype) -> Verdict:
    """The verdict on a model with `hf_qknorm` attention on the device: on logits and gradients, each of length 1."""
    exact = _small_model().to(dtype)
    ids = torch.arange(2 * TOKENS).view(2, TOKENS) * 7 % VOCABULARY
    got, eager = (
        _numbers(copy.deepcopy(exact).to(device), name, ids.to(device)) for name in ("hf_qknorm", "hf_qknorm_eager")
    )
    expected = _numbers(exact.double(), "hf_qknorm_eager", ids)
    joined = [
        torch.cat([(x.double().cpu() / y.norm()).flatten() for x, y in zip(numbers, expected, strict=True)])
        for numbers in (got, expected, eager)
    ]
    actual, wanted, plain = joined
    error, budget = verdict(actual, wanted, plain)
    return Verdict(error, budget + torch.finfo(dtype).eps)


def _small_model() -> Any:
    """A patched Llama of one layer on the CPU: grouped queries, head_dim 64, and a cap that bends the logits."""
    from transformers import LlamaConfig, LlamaForCausalLM  # slow to import

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=TOKENS, initializer_range=0.1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return patch_model(LlamaForCausalLM(config), Scheme(q="rms", k="rms", softcap=5.0))


def _numbers(model: Any, attention: str, ids: Tensor) -> list[Tensor]:
    """The logits, and the gradients of the attention layer's parameters."""
    model.set_attn_implementation(attention)
    found = model(input_ids=ids, labels=ids)
    found.loss.backward()
    return [found.logits.detach(), *(p.grad for p in model.model.layers[0].self_attn.parameters())]
