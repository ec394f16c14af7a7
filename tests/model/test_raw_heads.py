"""The rotation of kernels, which the cosines of a step hold for its layers, and where no kernel computes."""

import gc
import weakref

import pytest
import torch

from hf_qknorm import patch_model
from hf_qknorm.model.raw_heads import kernel_rotary
from qknorm_tests.tables import make_batch, sharp_model


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("rope", "columns"), [("halves", [0, 1, 2]), ("pairs", [0, 2, 4]), ("once", [*range(6)])])
def test_it_is_made_once_for_the_same_angles(rope, columns, grad):
    with torch.set_grad_enabled(grad):
        cos, sin, other = (torch.randn(1, 5, 6) for _ in range(3))
        made = kernel_rotary((cos, sin), rope)
        assert torch.equal(made.cos, cos[..., columns])
        assert torch.equal(made.sin, sin[..., columns])
        assert kernel_rotary((cos, sin), rope) is made
        assert torch.equal(kernel_rotary((cos, other), rope).sin, other[..., columns])
        assert kernel_rotary((cos, other), "pairs_by_halves").interleaved
        cos.mul_(2)  # as a buffer of a graph, which each step fills anew
        assert torch.equal(kernel_rotary((cos, other), rope).cos, cos[..., columns])


def test_it_is_freed_with_the_cosines():
    cos = torch.randn(1, 5, 6)
    kernel_rotary((cos, torch.randn(1, 5, 6)), "halves")
    freed = weakref.ref(cos)
    del cos
    gc.collect()
    assert freed() is None


def test_angles_that_are_trained_get_gradients():
    cos, sin = (torch.randn(1, 5, 6, requires_grad=True) for _ in range(2))
    for _ in range(2):
        made = kernel_rotary((cos, sin), "halves")
        (made.cos.sum() + 2 * made.sin.sum()).backward()
    expected = torch.tensor([2.0, 2, 2, 0, 0, 0]).expand(1, 5, 6)
    assert torch.equal(cos.grad, expected)
    assert torch.equal(sin.grad, 2 * expected)


@pytest.mark.usefixtures("compiled")
def test_torch_func_computes_norms_in_pytorch():
    model = patch_model(sharp_model("llama"), "qk_norm_cap", attn_implementation="hf_qknorm_eager")
    batch, weights = make_batch("plain"), {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights):
        return torch.func.functional_call(model, weights, kwargs=batch).loss

    slope = torch.func.jvp(loss, (weights,), (torch.func.grad(loss)(weights),))[1]
    grads = torch.autograd.grad(loss({}), [*model.parameters()])
    torch.testing.assert_close(slope, sum(x.square().sum() for x in grads), rtol=1e-4, atol=0)
