"""For the tests of what watches a model: the hooks on it."""

from hf_qknorm.model.attention import patched_layers


def hooks(model):
    """All hooks and observers on the modules of a model."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = [getattr(module, kind) for module in model.modules() for kind in kinds]
    watched = [layer for layer in patched_layers(model).values() if layer.observers or "v_norm" in layer._modules]
    return [*filter(None, found), *watched]
