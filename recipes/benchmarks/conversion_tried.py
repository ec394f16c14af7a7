"""Measure the cause of the cost of normed keys.

    python recipes/benchmarks/conversion_tried.py --checkpoint ../shared/checkpoints/gpt2-shakespeare \
        --text ../shared/data/tinyshakespeare.txt --part sizes

Data and figures are those of `conversion.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from conversion import LENGTH, SHARED, Story, run
from torch import Tensor

from hf_qknorm.demo.training import mean_loss
from hf_qknorm.model.attention import as_unpatched, patched_layers


def sizes(story: Story) -> None:
    """Measure what the norm of the keys removes: how key sizes vary, by what, and the gain from restoring parts of
    it.
    """
    model = story.patched(SHARED)
    layers = patched_layers(model)
    seen = key_sizes(model, story.calibration[:8])
    tokens = torch.cat(story.calibration[:8])
    print("\n| keys | std of log size | by position | by token |\n|---|---:|---:|---:|")
    for name, size in seen.items():
        log = size.log()
        whole = log.var((0, 1))
        by_token = torch.stack([log[tokens == token].mean(0) for token in tokens.unique()])
        ranks = torch.searchsorted(tokens.unique(), tokens)
        shares = (log.mean(0).var(0) / whole, by_token[ranks].var((0, 1)) / whole)
        print(f"| {name} | {whole.sqrt().mean():.2f} | {' | '.join(f'{share.mean():.0%}' for share in shares)} |")

    def give_back(size: Tensor, norm: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out * size[: out.shape[1], :, None]

    def loss(size_of: Callable[[str], Tensor]) -> float:
        hooks = []
        for name, layer in layers.items():
            layer.q_norm.bypass = True
            hooks.append(layer.k_norm.register_forward_hook(partial(give_back, size_of(name))))
        result = mean_loss(model, story.held_out)
        for hook in hooks:
            hook.remove()
        return result

    constant = loss(lambda name: seen[name].mean((0, 1)).expand(LENGTH, -1))
    by_position = loss(lambda name: seen[name].mean(0))
    print(f"\nKeys alone normed: {constant:.3f} with one length per head, {by_position:.3f} with one per position too")


def key_sizes(model: Any, batches: list[Tensor]) -> dict[str, Tensor]:
    """Return the divisor of each key's norm, `[B, T, H]` per layer, in the unpatched model."""
    seen: dict[str, list[Tensor]] = {}

    def add(name: str, norm: Any, args: tuple[Tensor, ...]) -> None:
        x = args[0] - args[0].mean(-1, keepdim=True) if norm.norm == "layer" else args[0]
        seen.setdefault(name, []).append(x.pow(2).mean(-1).sqrt())

    layers = patched_layers(model).items()
    hooks = [layer.k_norm.register_forward_pre_hook(partial(add, name)) for name, layer in layers]
    with torch.no_grad(), as_unpatched(model):
        for batch in batches:
            model(batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


if __name__ == "__main__":
    run([sizes], __doc__)
