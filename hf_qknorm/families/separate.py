"""Llama's style: `q_proj`, `k_proj`, `v_proj`, `o_proj`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_qknorm.families.style import Projected, Style


def project(module: Any, hidden_states: Tensor) -> Projected:
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    return (
        module.q_proj(hidden_states).view(shape),
        module.k_proj(hidden_states).view(shape),
        module.v_proj(hidden_states).view(shape),
    )


def output(module: Any, attended: Tensor) -> Tensor:
    return module.o_proj(attended)


SEPARATE = Style(project, output, weights=("q_proj", "k_proj", "v_proj"))
