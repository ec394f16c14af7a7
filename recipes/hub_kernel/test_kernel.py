"""The kernel against its formula in fp64, on the device that is there."""

import kernels
import pytest
import torch

kernel = kernels.get_kernel("org/qknorm-attention", version=1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def formula(q, k, v, visible, softcap, sinks):
    """softmax(softcap·tanh(q·kᵀ / √D / softcap))·v over the visible keys, as `[B, T, H, D]`."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(*logits.shape[:3], 1)], -1)
    return (torch.softmax(logits, -1)[..., : k.shape[2]] @ v).transpose(1, 2)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_output_and_gradients(softcap, window, with_sinks):
    torch.manual_seed(0)
    batch, heads, heads_kv, length, head_dim = 2, 4, 2, 50, 16
    q = 5 * torch.randn(batch, heads, length, head_dim, device=DEVICE)
    k, v = (torch.randn(batch, heads_kv, length, head_dim, device=DEVICE) for _ in range(2))
    inputs = [q, k, v] + ([torch.randn(heads, device=DEVICE)] if with_sinks else [])
    inputs = [x.requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    behind = torch.arange(length, device=DEVICE)[:, None] - torch.arange(length, device=DEVICE)
    visible = (behind >= 0) & (behind < (window or length))
    mask = None if window is None else visible.expand(batch, 1, -1, -1)

    out, weights = kernel.flash_attn_forward(
        torch.nn.Module(), *inputs[:3], mask, softcap=softcap, s_aux=inputs[3] if with_sinks else None
    )
    expected = formula(*exact[:3], visible, softcap, exact[3] if with_sinks else None)
    assert weights is None
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, upstream)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    torch.testing.assert_close([x.double() for x in found], list(wanted), rtol=1e-3, atol=1e-3)
