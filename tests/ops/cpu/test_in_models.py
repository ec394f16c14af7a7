"""Norm and RoPE in C++ in patched models: on every backend, in training, under checkpointing and in generation."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_qknorm import patch_model
from hf_qknorm.families.style import CACHE
from hf_qknorm.ops.cpu import build, norm_rope

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture
def calls(monkeypatch) -> list[Tensor]:
    """The queries of each call."""
    found: list[Tensor] = []
    inner = norm_rope.norm_rope
    monkeypatch.setattr(norm_rope, "norm_rope", lambda heads: found.append(heads.q) or inner(heads))
    return found


def model(scheme: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    return patch_model(LlamaForCausalLM(config), scheme).eval()


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # renamed in v6
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("scheme", "backend"),
    [("qk_norm", "sdpa"), ("q_norm", "eager"), ("qk_norm_cap", "hf_qknorm"), ("qk_norm_cap", "hf_qknorm_tiled")],
)
def test_models_take_it_on_every_backend(scheme, backend, checkpointing, calls, monkeypatch):
    """In training, under checkpointing and in generation: one arithmetic."""
    made, ids = model(scheme), torch.arange(9)[None]
    made.set_attn_implementation(backend)
    with monkeypatch.context() as without:
        without.setattr(build, "_switch", lambda: "0")
        wanted = made(ids, labels=ids)
        wanted.loss.backward()
        gradients = {name: x.grad.clone() for name, x in made.named_parameters()}
    assert not calls
    made.zero_grad()
    if checkpointing:
        made.train().gradient_checkpointing_enable()
    got = made(ids, labels=ids)
    got.loss.backward()
    assert len(calls) == (4 if checkpointing else 2)
    torch.testing.assert_close(got.logits, wanted.logits)
    torch.testing.assert_close({name: x.grad for name, x in made.named_parameters()}, gradients)
    calls.clear()
    made.eval()
    with torch.no_grad():
        assert torch.equal(made(ids, use_cache=True).logits, got.logits)
        last = made(ids[:, 8:], **{CACHE: made(ids[:, :8])[CACHE]}).logits
    assert [q.shape[2] for q in calls] == [9, 9, 8, 8, 1, 1]
    torch.testing.assert_close(last[:, 0], got.logits[:, -1], atol=1e-5, rtol=1e-5)


def test_a_norm_with_hooks_is_called(calls):
    made, ids, seen = model("qk_norm_cap"), torch.arange(9)[None], []
    expected = made(ids).logits
    norm = made.model.layers[0].self_attn.q_norm
    norm.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].shape))
    calls.clear()
    torch.testing.assert_close(made(ids).logits, expected)
    assert seen == [(1, 9, 4, 16)]
    norm.register_forward_pre_hook(lambda module, arguments: (0 * arguments[0],))
    assert not torch.allclose(made(ids).logits, expected)
    assert len(calls) == 2  # those of the other layer
