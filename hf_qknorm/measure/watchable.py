"""The modules that are observed: the attention of a model, patched or not, and the outputs beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from torch import nn
from transformers import PreTrainedModel

from hf_qknorm.families import REFUSED, family_of
from hf_qknorm.model.attention import QKNormAttention, patched_layers
from hf_qknorm.model.install import install, own_layers, uninstall
from hf_qknorm.patch import require_own_forward
from hf_qknorm.scheme import SCHEMES

OUT: Final = ("o_proj", "out_proj", "c_proj", "dense", "Wo")  # in the attention layer
MLP: Final = ("mlp", "feed_forward", "mlp_block", "ffn", "block_sparse_moe", "shared_mlp", "fc2")  # beside it
DOWN: Final = ("down_proj", "c_proj", "fc2", "dense_4h_to_h", "w2", "Wo")  # in the MLP


@contextmanager
def watchable_layers(model: Any) -> Iterator[dict[str, QKNormAttention]]:
    """The attention modules of `model` by name; in an unpatched model they have the scheme "none" inside the block.

    "none" changes no number. Unlike `patch_model` this leaves the model's class and config alone, and reaches into
    wrappers such as DDP's and PEFT's. After the block the modules are as before.

    Raises ValueError for a model without an attention module of a known family, or with one whose forward another tool
    has replaced.
    """
    with ExitStack() as stack:
        for module in () if patched_layers(model) else list(model.modules()):
            if isinstance(module, PreTrainedModel) and module.config.model_type not in REFUSED:
                family = family_of(module.config)
                if own_layers(module, family):
                    require_own_forward(module, family)
                    install(module, family, SCHEMES["none"])
                    stack.callback(uninstall, module)
        layers = patched_layers(model)
        if not layers:
            raise ValueError(
                f"{type(model).__name__} has no attention module of a known family, whose logits could be watched: "
                "see hf-qknorm families"
            )
        yield layers


def block_outputs(model: nn.Module, name: str) -> dict[str, nn.Module]:
    """The output projections of the attention layer `name` ("out") and of the MLP that follows it ("mlp").

    A mixture of experts has no projection of its own: its module stands for it. A layer with several MLPs is measured
    at one. A module that is not found has no entry, such as an MLP in a layer of its own (Nemotron-H).
    """
    path = name.rpartition(".")[0]
    layer, parent, grandparent = (model.get_submodule(x) for x in (name, path, path.rpartition(".")[0]))
    mlps: Any = _first(grandparent, ("mlps",)) if isinstance(parent, nn.ModuleList) else None
    mlp = _first(parent, MLP) if mlps is None else mlps[int(name.rpartition(".")[2])]  # LongCat
    if mlp is None and not isinstance(grandparent, nn.ModuleList):  # DBRX
        mlp = _first(grandparent, ("ffn", "mlp"))
    out = _first(layer, OUT)
    if out is None and "output" in parent._modules:  # BERT: a module beside attention, and one beside the MLP
        out, mlp = (_first(owner.get_submodule("output"), ("dense",)) for owner in (parent, grandparent))
    mlp = mlp if mlp is None else _first(mlp, DOWN) or mlp
    return {part: module for part, module in (("out", out), ("mlp", mlp)) if module is not None}


def _first(owner: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    """The first child of these names."""
    return next((module for name in names if (module := owner._modules.get(name)) is not None), None)
