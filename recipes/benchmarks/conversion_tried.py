"""Measure alternatives that keep more of a trained model, and the cause of the cost of normed keys.

    python recipes/benchmarks/conversion_tried.py --checkpoint ../shared/checkpoints/gpt2-shakespeare \
        --text ../shared/data/tinyshakespeare.txt --part tried

Parts: tried, sizes. Data and figures are those of `conversion.py`, with fits of half as many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from conversion import LENGTH, PER_HEAD, QK, SHARED, Story, head, run
from torch import Tensor
from tqdm.auto import tqdm

from hf_qknorm import Scheme
from hf_qknorm.convert import fit
from hf_qknorm.demo.training import mean_loss
from hf_qknorm.model.attention import as_unpatched, head_norms, patched_layers

STEPS = 60


@contextmanager
def settings(**values: float) -> Iterator[None]:
    """Change the fit's constants within a block."""
    old = {name: getattr(fit, name) for name in values}
    try:
        for name, value in values.items():
            setattr(fit, name, value)
        yield
    finally:
        for name, value in old.items():
            setattr(fit, name, value)


def tried(story: Story) -> None:
    """Measure the alternatives."""
    head(story, "alternative")
    variants = {
        "queries alone, `fit`": Scheme(q="auto"),
        "keys alone, `fit`": Scheme(k="auto"),
        "RMSNorm with a bias, shared, `fit`": Scheme(q="rms", k="rms", bias=True),
        "LayerNorm with a bias, shared, `fit`": Scheme(q="layer", k="layer"),
        "one scalar a layer, `fit`": Scheme(**QK, gain="scalar"),
    }
    for label, scheme in variants.items():
        story.row(label, scheme, story.patched(scheme, "fit", STEPS))
    for rate in (0.02, 0.1):
        with settings(GAIN_RATE=rate):
            story.row(f"shared, `fit`, rate {rate:g}", SHARED, story.patched(SHARED, "fit", STEPS))
    for rate in (0.025, 0.25, 0.75):
        with settings(PROJECTION_RATE=rate):
            story.row(f"shared, `fit_qk`, rate {rate:g}/width", SHARED, story.patched(SHARED, "fit_qk", STEPS))
    model = fitted_from(story, SHARED, split_evenly)
    story.row("shared, gain split evenly between q and k, then `fit`", SHARED, model)
    for label, scheme in (("shared", SHARED), ("per head", PER_HEAD)):
        story.row(f"{label}, attention rows matched, 90 steps", scheme, matched(story, scheme, 90))
        model = fitted_from(story, scheme, lambda model: match_rows(story, model, 30))
        story.row(f"{label}, rows matched (30 steps), then `fit`", scheme, model)


def fitted_from(story: Story, scheme: Scheme, start: Callable[[Any], None]) -> Any:
    """Fit from moments that `start` has changed."""
    model = story.patched(scheme, "moments")
    start(model)
    batches = [{"input_ids": batch} for batch in story.calibration]
    fit.fit_gains(model, batches[8:], batches[:8], steps=STEPS)
    return model


@torch.no_grad()
def split_evenly(model: Any) -> None:
    """Give q and k gains of the same mean size: only their product affects the logits, but Adam sees each."""
    for layer in patched_layers(model).values():
        q, k = layer.q_norm, layer.k_norm
        ratio = (k.weight.abs().mean() / q.weight.abs().mean()).sqrt()
        for norm, factor in ((q, ratio), (k, 1 / ratio)):
            for parameter in norm.parameters():
                parameter.mul_(factor)


def matched(story: Story, scheme: Scheme, steps: int) -> Any:
    model = story.patched(scheme, "moments")
    match_rows(story, model, steps)
    return model


def match_rows(story: Story, model: Any, steps: int, rate: float = 0.1) -> None:
    """Fit each layer's gains to the base model's attention rows (KL), all layers at once, on the base model's
    activations.
    """
    layers = patched_layers(model)
    inputs: dict[Any, tuple[Any, ...]] = {}
    hooks = [
        layer.register_forward_pre_hook(
            lambda layer, args, kwargs: inputs.update(
                {layer: (args[0] if args else kwargs["hidden_states"], kwargs.get("position_embeddings"))}
            ),
            with_kwargs=True,
        )
        for layer in layers.values()
    ]
    gains = [p for layer in layers.values() for norm in head_norms(layer).values() for p in norm.parameters()]
    optimizer = torch.optim.Adam(gains, lr=rate, betas=(0.9, 0.99))
    for step in tqdm(range(steps), desc="rows", leave=False):
        with torch.no_grad(), as_unpatched(model):
            model(story.calibration[step][:4], use_cache=False)
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        loss = sum((row_divergence(layer, *inputs[layer]) for layer in layers.values()), torch.zeros(()))
        optimizer.zero_grad()
        torch.autograd.backward(loss, inputs=gains)
        optimizer.step()
    for hook in hooks:
        hook.remove()


def row_divergence(layer: Any, hidden: Tensor, rotation: Any) -> Tensor:
    """Return the mean KL between a layer's attention rows with and without its norms."""

    def rows(q: Tensor, k: Tensor, scale: float) -> Tensor:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if rotation is not None:
            q, k = layer.modelling.apply_rotary_pos_emb(q, k, *rotation)
        logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * scale
        return logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -1e9).log_softmax(-1)

    q, k, _ = (x.detach() for x in layer.family.style.project(layer, hidden))
    target, predicted = rows(q, k, layer.scaling), rows(layer.q_norm(q), layer.k_norm(k), layer.logit_scale)
    return (target.exp() * (target - predicted)).sum(-1).mean()


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
    run([tried, sizes], __doc__)
