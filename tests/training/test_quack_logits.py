"""QuacK's guarantee: the mean |change| of a logit in a step depends on no size of weights, biases, gains."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_qknorm import FAMILIES, QuacK, patch_model
from qknorm_tests.head_rows import ROWS, attention_layers, input_norms, outputs_first
from qknorm_tests.tiny import tiny_model

STEP = 1e-4  # so small that a change is linear in it
GROWN = (1.0, 100.0)
DRAWS = 12


class Signs(torch.optim.Optimizer):
    """Steps of ±STEP on some parameters, with random signs: the size of Adam's."""

    def __init__(self, model: nn.Module, where: list[tuple[Tensor, slice]]) -> None:
        super().__init__(model.parameters(), {})
        self.where, self.generator = where, torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, rows in self.where:
            signs = torch.randint(0, 2, p[rows].shape, generator=self.generator, dtype=p.dtype)
            p[rows] += STEP * (2 * signs - 1)


def heads_of(model: Any, model_type: str, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys `[T, H, D]` of the first layer, without RoPE, for the residual stream `[T, C]`."""
    layer, norms = attention_layers(model, model_type)[0], input_norms(model, model_type)[0]
    if "uq" in norms:
        x = norms["dq"](hidden)
        latent, turned = layer.kv_a_proj_with_mqa(x).split([layer.kv_lora_rank, layer.qk_rope_head_dim], dim=-1)
        q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x))).view(len(x), -1, layer.qk_head_dim)
        k = layer.kv_b_proj(layer.kv_a_layernorm(latent)).view(*q.shape[:2], -1)[..., : layer.qk_nope_head_dim]
        return q, torch.cat((k, turned[:, None].expand(-1, q.shape[1], -1)), -1)
    q, k = (x[0] for x in FAMILIES[model_type].style.project(layer, norms["q"](hidden)[None])[:2])
    return q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)


@torch.no_grad()
def change(model: Any, model_type: str, optimizer: Any) -> float:
    """The mean |change| of a logit over some steps."""
    hidden = torch.randn(24, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for _ in range(DRAWS):
        before, _, after = logits(model, model_type, hidden), optimizer.step(), logits(model, model_type, hidden)
        found.append((after - before).abs().mean())
    return float(torch.stack(found).mean())


def logits(model: Any, model_type: str, hidden: Tensor) -> Tensor:
    q, k = heads_of(model, model_type, hidden)
    return torch.einsum("thd,shd->hts", q, k)


def moved(model: Any, model_type: str, parts: tuple[str, ...], kind: int) -> list[tuple[Tensor, slice]]:
    """The weights (kind 0) or biases (1) of the first layer's parts, with the rows of their heads."""
    layer = attention_layers(model, model_type)[0]
    rows = [(outputs_first(layer, ROWS[model_type][part][0]), part) for part in parts]
    return [(found[kind], head) for found, part in rows for head in ROWS[model_type][part][1] if len(found) > kind]


def tried(model_type: str) -> PreTrainedModel:
    """A tiny model in fp64, with biases and norms' biases of 0.1 rms, and gains about 1."""
    model = tiny_model(model_type, initializer_range=0.1, num_hidden_layers=1, **SETTINGS.get(model_type, {}))
    generator = torch.Generator().manual_seed(2)
    for name, p in model.named_parameters():
        if ("norm" in name or "ln_" in name) and name.endswith("weight"):
            p.data += 0.2 * torch.randn(p.shape, generator=generator)
    return model.double()


@torch.no_grad()
def grow(model: Any, model_type: str, parts: tuple[str, ...], grown: Any, factor: float) -> None:
    """Make the weights (0) or biases (1) of parts, or a parameter of the norms before them, `factor` times larger."""
    if isinstance(grown, int):
        for p, rows in moved(model, model_type, parts, grown):
            p[rows] *= factor
        return
    norms = input_norms(model, model_type)[0]
    one = float(FAMILIES[model_type].gain_plus_one and grown == "weight")
    for norm in {norms[part] for part in parts}:
        p = getattr(norm, grown)
        p.copy_((p + one) * factor - one)


SETTINGS: dict[str, Any] = {"deepseek_v3": {"first_k_dense_replace": 1}, "gpt2": {"n_head": 4}}
BIASED = ("gpt2", "gpt_neox", "qwen2")
SIDES = {"deepseek_v3": {"q": ("uq", "qr"), "k": ("uk", "kr")}}
# The model type, the side that moves, weights (0) or biases (1) of it, and what grows on the other side: weights,
# biases, or the gain or bias of the norm before them.
CASES = [
    (model_type, side, kind, grown)
    for model_type in ("deepseek_v3", "gemma", *BIASED)
    for side in ("q", "k")
    for kind in (0, 1)
    for grown in (0, 1, "weight", "bias")
    if (kind != 1 or (model_type in BIASED and side == "q")) and (grown != 1 or model_type in BIASED)
    if grown != "bias" or model_type in ("gpt2", "gpt_neox")
]


def spread(
    model_type: str, own: tuple[str, ...], kind: int, other: tuple[str, ...], grown: Any, *, plain: bool = False
) -> float:
    """The ratio of the changes by a step of the parts `own`, before and after `other` parts or their norms grow."""
    found = []
    for factor in GROWN:
        model = tried(model_type)
        steps = Signs(model, [])
        optimizer = steps if plain else QuacK(steps, model)
        optimizer.step()  # sees the initial sizes
        grow(model, model_type, other, grown, factor)
        steps.where = moved(model, model_type, own, kind)
        found.append(change(model, model_type, optimizer))
    return max(found) / min(found)


@pytest.mark.parametrize(("model_type", "side", "kind", "grown"), CASES)
def test_a_step_changes_logits_alike_whatever_grows(model_type, side, kind, grown):
    sides = SIDES.get(model_type, {"q": ("q",), "k": ("k",)})
    own, other = sides[side], sides["k" if side == "q" else "q"]
    assert spread(model_type, own, kind, other, grown) < 1.5
    assert spread(model_type, own, kind, other, grown, plain=True) > 5


@pytest.mark.parametrize("part", ["dq", "dkv"])
@pytest.mark.parametrize("grown", [("uq", "qr", "uk", "kr"), ("dq", "dkv")])
def test_a_step_of_the_weights_down_to_a_latent_changes_logits_alike(grown, part):
    assert spread("deepseek_v3", (part,), 0, grown, 0) < 1.5


@pytest.mark.parametrize(("model_type", "scheme"), [("qwen3", None), ("llama", "q_norm"), ("llama", "soft_cap")])
def test_a_model_with_norms_gets_one_warning(model_type, scheme, caplog):
    model = tiny_model(model_type)
    if scheme:
        patch_model(model, scheme)
    caplog.clear()
    QuacK(torch.optim.SGD(model.parameters(), 0.1), model)
    assert caplog.text.count("this model norms its queries or keys, and QuacK's") == (scheme != "soft_cap")
