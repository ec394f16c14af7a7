"""A whole training step of a 1B Llama, with and without norms and a cap on its attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import test_helpers_path  # noqa: F401
import torch
from bench_cases import judge
from error_budget import Verdict
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_qknorm as qk

SCHEME = "qk_norm_cap"
BACKEND = "hf_qknorm_triton" if torch.cuda.is_available() else "hf_qknorm"  # without a fallback on a GPU


@dataclass(frozen=True)
class Size:
    """A Llama's shape and batch; the defaults are Llama 3.2 1B's."""

    hidden: int = 2048
    inner: int = 8192
    layers: int = 16
    heads: int = 32
    heads_kv: int = 8
    vocabulary: int = 128_256
    batch: int = 4
    length: int = 4096

    def __str__(self) -> str:
        head_dim = self.hidden // self.heads
        return f"Llama {self.layers} layers of {self.heads}/{self.heads_kv}x{head_dim} T{self.length} B{self.batch}"

    def at(self, length: int) -> Size:
        """The same attention in a small model, whose logits are known in fp64."""
        return replace(self, layers=2, inner=512, vocabulary=509, batch=1, length=min(length, self.length))

    def build(self, device: torch.device, dtype: torch.dtype, backend: str, patched: bool) -> nn.Module:
        """A model with random weights, the same for all backends."""
        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads_kv,
            vocab_size=self.vocabulary,
            max_position_embeddings=max(self.length, 64),
            tie_word_embeddings=True,
        )
        config._attn_implementation = "sdpa"
        torch.manual_seed(0)
        with device:
            model: Any = LlamaForCausalLM(config).to(dtype)
        if patched:
            qk.patch_model(model, SCHEME)
            model.set_attn_implementation(backend)
        model.config.use_cache = False
        return model.train()

    def tokens(self, device: torch.device) -> Tensor:
        return torch.randint(self.vocabulary, (self.batch, self.length), device=device)


@dataclass(frozen=True)
class Step:
    """One way to train it."""

    name: str
    patched: bool
    compiled: bool = False

    @property
    def ours(self) -> bool:
        return self.patched


STEPS = (
    Step("unpatched, sdpa", False),
    Step(f"ours: {SCHEME}", True),
    Step("unpatched, sdpa, torch.compile", False, True),
    Step(f"ours: {SCHEME}, torch.compile", True, True),
)


class Training:
    """A model in training; `run` takes a step."""

    def __init__(self, step: Step, size: Size, device: torch.device, dtype: torch.dtype) -> None:
        self.step, self.size, self.device, self.dtype = step, size, device, dtype
        self.batches = [size.tokens(device) for _ in range(2)]

    @cached_property
    def model(self) -> Any:
        model = self.size.build(self.device, self.dtype, BACKEND, self.step.patched)
        if self.step.compiled:  # without a GPU what matters is that it can be traced
            model.compile(backend="inductor" if self.device.type == "cuda" else "aot_eager")
        return model

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def run(self, n: int) -> None:
        ids = self.batches[n % len(self.batches)]
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def check(size: Size, device: torch.device, dtype: torch.dtype) -> dict[str, Verdict]:
    """Logits and gradients of a patched model against its eager attention in fp64 and in `dtype`."""

    def results(dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
        model = size.build(device, rounded, backend, True).to(dtype)
        out = model(input_ids=ids, labels=ids)
        attention = model.model.layers[0].self_attn
        weights = {"q_norm": attention.q_norm.weight, "k_proj": attention.k_proj.weight}
        gradients = torch.autograd.grad(out.loss, list(weights.values()))
        return {"logits": out.logits.detach(), **dict(zip(weights, gradients, strict=True))}

    rounded, ids = dtype, size.tokens(device)
    got = results(dtype, BACKEND)
    return judge(got, results(torch.float64, "hf_qknorm_eager"), results(dtype, "hf_qknorm_eager"))
