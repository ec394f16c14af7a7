"""The tables that tests iterate over: families × schemes, models and batches.

Random gains, because gains of 1 hide mistakes; large weights, because flat attention hides a lost mask, norm or cap.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.roformer import modeling_roformer

from hf_qknorm import FAMILIES, SCHEMES, Scheme, patch_model, unpatch_model
from hf_qknorm.calibration.gains import named_norms
from hf_qknorm.families import Family, known_families
from hf_qknorm.families.class_names import PARTS
from hf_qknorm.model.attention import patched_layers
from hf_qknorm.model.install import as_unpatched
from hf_qknorm.model.norms import HeadNorm
from qknorm_tests.covering import covering
from qknorm_tests.error_budget import error
from qknorm_tests.tiny import TINY, tiny_config, tiny_model

# Those that most tests run over. Every other family goes through tests/families/test_sweep.py alone.
MODEL_TYPES = ("gemma2", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3")

BATCHES = ("plain", "left", "right", "packed")
LENGTH = 20  # longer than the tiny models' sliding window of 8


class Codes(Tensor):
    """A weight as quantisers store it: a parameter of its own class, which computes as floating point."""


@cache
def applies(model_type: str, scheme: Scheme) -> bool:
    """Whether a tiny model of the family can have the scheme: one with norms of its own takes no others."""
    return FAMILIES[model_type].refusal(tiny_config(model_type), scheme) is None


KNEE = Scheme(q="auto", k="auto", v="auto")  # `randomise` gives its norms a knee
TRIED = {**SCHEMES, "knee": KNEE}
# Every model, every preset, and norms before attention that fold with biases and without; the sweep has all styles
PAIRS = sorted(
    {
        *covering(MODEL_TYPES, SCHEMES, fits=lambda model_type, name: applies(model_type, SCHEMES[name]), strength=1),
        *(("gpt2", name) for name in ("qk_norm_cap", "qkv_norm", "henry")),
        *(("llama", name) for name in ("qk_norm_cap", "qkv_norm", "lp")),
    }
)
KNEES = [(model_type, "knee") for model_type in ("gpt2", "llama")]

# Types whose code was another before transformers masked the decoder of RoFormer
CHANGED = set() if hasattr(modeling_roformer, "create_causal_mask") else {"doge", "moshi"}

# Their input is more than tokens: tests/families/test_other_models.py runs over them
OWN_INPUTS = ("musicgen_decoder", "musicgen_melody_decoder")


def causal_families() -> list[str]:
    """The model types that have a causal language model of tokens; tests/families/test_other_models.py has others."""
    loaded = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *PARTS}
    known = [model_type for model_type in known_families() if model_type in loaded and model_type not in OWN_INPUTS]
    return [model_type for model_type in known if model_type not in CHANGED]


def chosen(config: pytest.Config, few: Iterable[str], every: Iterable[str]) -> list[str]:
    """The cases of a sweep: the few, with `--all-families` every one, with `--other-families` those that this adds."""
    cases = {"few": few, "all": every, "others": [case for case in every if case not in few]}
    return [*cases[config.getoption("families")]]


def one_of_each_style() -> list[str]:
    """Of the types with cross-attention, and of those that take more than others, one of each kind."""
    return list({_kind(FAMILIES[model_type]): model_type for model_type in reversed(causal_families())}.values())


def swept(config: pytest.Config) -> list[str]:
    return chosen(config, one_of_each_style(), causal_families())


def _kind(family: Family) -> Any:
    style, across = family.style, family.style.project_across is not None
    return (across, bool(style.arguments)) if across or style.arguments else (style, family.own_norms is True)


def sharp_model(model_type: str, **settings: Any) -> PreTrainedModel:
    """A tiny model whose attention logits spread over several nats; `tiny_model`'s own are near zero."""
    return tiny_model(model_type, **{"initializer_range": 0.2, **settings})


def make_batch(kind: str, *, labels: bool = True) -> dict[str, Any]:
    """Two rows of tokens: without padding, padded at the left or the right, or several sequences packed into a row."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, TINY["vocab_size"], (2, LENGTH), generator=generator)
    batch: dict[str, Any] = {"input_ids": tokens}
    if kind in ("left", "right"):
        mask = torch.ones_like(tokens)
        mask[0, slice(0, 6) if kind == "left" else slice(-6, None)] = 0
        batch |= {"input_ids": tokens * mask, "attention_mask": mask}
    elif kind == "packed":
        rows = ([7, 13], [11, 4, 5])
        batch["use_cache"] = False  # with a cache, transformers reads no packing from the positions
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    if labels:  # none at padding: backends may give empty rows any result
        batch["labels"] = tokens.where(real(batch) & real(batch).roll(1, dims=1), -100)
    return batch


def random_tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    """Token ids `[rows, length]` above the special ones."""
    return torch.randint(3, TINY["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def norm_inputs(model: Any, batches: list[dict[str, Any]]) -> dict[tuple[str, str], Tensor]:
    """The inputs of each norm of a patched model, by layer and name, in the unpatched model: `[N, H, D]` in fp64."""
    seen: dict[tuple[str, str], list[Tensor]] = {key: [] for key in named_norms(model)}
    with ExitStack() as hooks, as_unpatched(model):
        for key, norm in named_norms(model).items():
            note = lambda _, args, key=key: seen[key].append(args[0].flatten(0, 1).double())  # noqa: E731
            hooks.enter_context(norm.register_forward_pre_hook(note))
        for batch in batches:
            model(**batch)
    return {key: torch.cat(parts) for key, parts in seen.items()}


def real(batch: dict[str, Any]) -> Tensor:
    """Which positions hold a token and no padding, `[B, T]`."""
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()


def dense(ranges: Tensor, keys: int) -> Tensor:
    """The boolean mask `[B, 1, T, S]` that says what the ranges `[B, T, 2]` of keys do."""
    start, stop = ranges[:, None].unbind(-1)
    return torch.stack([(j >= start) & (j < stop) for j in range(keys)], -1)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, what: str = "result") -> None:
    """Fail unless the relative error, in the Frobenius norm, is at most `tolerance`."""
    got = error(actual.detach(), expected.detach())
    assert got <= tolerance, f"{what}: relative error {got:.1e} > {tolerance:.0e}"


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0, *, knee: float = 0.0, sharpness: float = 1.0) -> nn.Module:
    """Random gains, biases and mean lengths in every head norm of `model`, in place: each changes the result by itself.

    A knee of 0 leaves norms plain, but those of the scheme `KNEE`.
    """
    generator = torch.Generator().manual_seed(seed)
    if (
        getattr(model, "config", None) is not None
        and getattr(model.config, "qk_norm", None) == KNEE.resolve().to_dict()
    ):
        knee, sharpness = 1.0, 8.0
    for norm in (module for module in model.modules() if isinstance(module, HeadNorm)):
        for parameter, centre in ((norm.weight, norm.initial_gain), (norm.bias, 0.0)):
            if parameter is not None:
                noise = torch.randn(parameter.shape, generator=generator) * 0.3
                parameter.copy_(centre * (1 + noise) if centre else noise)
        if knee:
            norm.set_shape(norm.rounded(knee, 0.1 + float(torch.rand((), generator=generator)), sharpness))
    return model


@torch.no_grad()
def assert_backends_agree(
    model: PreTrainedModel,
    logits: Callable[[], Tensor],
    tolerance: float,
    backends: Sequence[str] = ("hf_qknorm", "hf_qknorm_eager"),
) -> None:
    """Fail unless the package's attention gives what the model's own gives, with "none" and with a cap.

    `logits` computes the model's logits; the model is unpatched before and after.
    """
    if model.config._attn_implementation != "eager":
        model.set_attn_implementation("eager")
    expected = logits()
    patch_model(model, "none")
    for backend in backends:
        model.set_attn_implementation(backend)
        assert_near(logits(), expected, tolerance, backend)
    patch_model(unpatch_model(model), Scheme(softcap=0.5))
    capped = logits()
    assert error(capped, expected) > 10 * tolerance, "the cap acts by more than backends may differ"
    for backend in ("eager", *backends):
        model.set_attn_implementation(backend)
        assert_near(logits(), capped, tolerance, f"capped {backend}")
    unpatch_model(model)


def fingerprint(model: PreTrainedModel) -> tuple[Any, ...]:
    """Class, structure, config and attributes of a model, without its numbers."""
    flags = {name: sorted(vars(module)) for name, module in model.named_modules()}
    return type(model), str(model), model.config.to_dict(), type(model.config), list(model.state_dict()), flags


def hooks(model: nn.Module) -> list[Any]:
    """All hooks and observers on the modules of a model."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = [getattr(module, kind) for module in model.modules() for kind in kinds]
    watched = [layer for layer in patched_layers(model).values() if layer.observers or "v_norm" in layer._modules]
    return [*filter(None, found), *watched]


def out_of(result: Any) -> Tensor:
    """The tensor that a model computes: logits, an image, or hidden states."""
    return next(result[name] for name in ("logits", "reconstruction", "last_hidden_state") if name in result)


def step(model: PreTrainedModel, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Loss, logits and every gradient of one training step, its dropout seeded."""
    model.train()
    model.zero_grad()
    torch.manual_seed(0)
    result = model(**batch)
    loss = result["loss"] if "loss" in result else out_of(result).square().mean()
    loss.backward()
    model.eval()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "logits": out_of(result).detach(), **gradients}


def assert_identical(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Fail unless both hold the same tensors, to the bit."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 2e-4, least: float = 1e-7) -> None:
    """Fail unless each tensor is near the other of its name, relative to itself and to its largest number."""
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(got[name], x, rtol=rtol, atol=rtol / 10 * float(x.abs().max()) + least, msg=name)


def trained_like(model_type: str, *, biases: bool = True, **settings: Any) -> PreTrainedModel:
    """A model whose norms and projections have gains and biases that differ from channel to channel."""
    model = sharp_model(model_type, **settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            if name.endswith("bias") and not biases:
                parameter.zero_()
    return model
