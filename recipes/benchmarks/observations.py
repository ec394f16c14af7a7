"""Records of a model during a run of the sweeps: logits, entropies, and the outputs of linear layers."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_qknorm import logit_statistics
from hf_qknorm.model.attention import patched_layers

SEQUENCES = 16  # of the held-out text, in each look
LAYERS = {"qkv": r"\.attn\.c_attn", "proj": r"\.attn\.c_proj", "fc1": r"\.mlp\.c_fc", "fc2": r"\.mlp\.c_proj"}
COLUMNS = ("step", "logit", "entropy", "lowest", *LAYERS, "query_step", "key_step")


class Observations:
    """Notes about a patched GPT-2, in columns; every `every` steps a row.

    - `logit`: the largest |logit| before any cap
    - `entropy`, `lowest`: attention entropy as a share of uniform attention's, the mean of all heads and the smallest
    - `qkv`, `proj`, `fc1`, `fc2`: the root mean square of these layers' outputs, before any norm; the largest layer's
    - `query_step`, `key_step`: mean |Δlogit| due to the queries' part of the next step alone (weights, biases, gains),
      or to the keys', with the layer's inputs unchanged; the mean of all layers, heads and visible keys
    """

    def __init__(self, model: Any, batch: Tensor, every: int) -> None:
        self.model, self.batch, self.every = model, batch[:SEQUENCES], every
        self.layers: dict[str, Any] = dict(patched_layers(model))
        self.columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
        self.inputs: dict[str, Tensor] = {}  # of the layers at the last look
        self.heads: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def __call__(self, step: int) -> None:
        if self.heads:
            self._note_step()
        if step % self.every == 0:
            self._note_state(step)

    def _note_state(self, step: int) -> None:
        outputs: dict[str, list[float]] = {name: [] for name in LAYERS}
        hooks = []
        for name, module in self.model.named_modules():
            for kind in (kind for kind, pattern in LAYERS.items() if re.search(pattern, name)):
                if isinstance(module, Conv1D):
                    hooks.append(module.register_forward_hook(_noting(outputs[kind])))
        for name, layer in self.layers.items():
            hooks.append(layer.c_attn.register_forward_pre_hook(self._keeping(name)))
        self.model.eval()
        with logit_statistics(self.model) as seen:
            self.model(input_ids=self.batch)
        self.model.train()
        for hook in hooks:
            hook.remove()
        shares = torch.cat([layer.entropy / layer.even for layer in seen.values()])
        logit = max(float(layer.max_logit.max()) for layer in seen.values())
        found = {"logit": logit, "entropy": float(shares.mean()), "lowest": float(shares.min())}
        found |= {kind: max(values) for kind, values in outputs.items()}
        self.columns["step"].append(step)
        for name, value in found.items():
            self.columns[name].append(float(f"{value:.4g}"))
        self.heads = {name: _heads(layer, self.inputs[name]) for name, layer in self.layers.items()}

    def _note_step(self) -> None:
        moved = []
        for name, (q, k) in self.heads.items():
            new_q, new_k = _heads(self.layers[name], self.inputs[name])
            visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
            changes = ((new_q - q) @ k.mT, q @ (new_k - k).mT)
            moved.append([float(change[..., visible].abs().mean()) / q.shape[-1] ** 0.5 for change in changes])
        for column, values in zip(("query_step", "key_step"), zip(*moved, strict=True), strict=True):
            self.columns[column].append(float(f"{sum(values) / len(values):.4g}"))
        self.heads.clear()

    def _keeping(self, name: str) -> Any:
        def keep(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            self.inputs[name] = arguments[0].float()

        return keep


def _noting(values: list[float]) -> Any:
    def note(module: nn.Module, arguments: Any, out: Tensor) -> None:
        values.append(float(out.float().pow(2).mean().sqrt()))

    return note


def _heads(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's queries and keys for inputs x `[B, T, C]`, `[B, H, T, D]` each, after their norms."""
    q, k, _ = layer.c_attn(x).split(x.shape[-1], dim=-1)
    parts = {"q_norm": q, "k_norm": k}
    split = {name: part.unflatten(-1, (layer.num_heads, -1)) for name, part in parts.items()}
    normed = (layer._modules[name](part) if layer._modules.get(name) else part for name, part in split.items())
    q, k = (part.transpose(1, 2) for part in normed)
    return q, k
