"""For the tests of LogitMonitor: the hooks on a model, and gradient norms by head without the package."""

from __future__ import annotations

from hf_qknorm.model.attention import patched_layers


def hooks(model):
    """All hooks and observers on the modules of a model."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = [getattr(module, kind) for module in model.modules() for kind in kinds]
    watched = [layer for layer in patched_layers(model).values() if layer.observers or "v_norm" in layer._modules]
    return [*filter(None, found), *watched]


def gradients_by_hand(family, layer):
    """The norms of the gradients of each head's rows."""
    heads, heads_kv, d = layer.family.style.heads(layer)
    if family == "gpt2":
        q, k, _ = layer.c_attn.weight.grad.T.chunk(3)
    elif family == "gpt_neox":
        q, k, _ = layer.query_key_value.weight.grad.view(heads, 3, d, -1).unbind(1)
    elif family == "phi3":
        q, k, _ = layer.qkv_proj.weight.grad.split([heads * d, heads_kv * d, heads_kv * d])
    else:
        q, k = layer.q_proj.weight.grad, layer.k_proj.weight.grad
    return q.reshape(heads, -1).norm(dim=1), k.reshape(heads_kv, -1).norm(dim=1)
