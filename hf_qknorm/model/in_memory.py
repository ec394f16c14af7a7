"""The name of a model that was patched, calibrated or unpatched in memory: no checkpoint holds that model yet.

Tools load a model by the name of another: TRL its reference model by the policy's, PEFT an adapter's base model. That
name gives the model's tokenizer, but other weights or another scheme.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from hf_qknorm.scheme import in_words


class InMemoryName(str):
    """The name by which a model was loaded before it was changed in memory: `from_pretrained` of a model refuses it."""

    schemes: str  # of the model's layers, in words

    def __new__(cls, name: str, schemes: str = "") -> InMemoryName:
        self = super().__new__(cls, name)
        self.schemes = schemes
        return self

    def refusal(self, caller: str) -> OSError:
        """Return the error of a `caller` that would load the model as it was before."""
        return OSError(
            f"{caller} got the name {str(self)!r} of a model that was changed in memory, and the checkpoint holds the "
            "model as it was before. Save the changed model and give its folder; or pass TRL's trainers a model as "
            "ref_model=. For the model as it was, give str(name)"
        )

    def unsaved(self) -> str:
        """Return the name that files get, which no tool can load: the base model of an adapter, for example."""
        note = f"changed in memory, {self.schemes}, not saved: put the folder of the saved model here"
        return f"{self} ({note})" if self else ""


def mark_in_memory(model: Any, *, marked: bool = True) -> None:
    """Mark the names of `model` and its config: the weights in memory differ from that checkpoint.

    With `marked=False` make them plain strings again.
    """
    from hf_qknorm.model.attention import patched_layers

    schemes = in_words((type(x.config).model_type, x.scheme) for x in patched_layers(model).values())
    kind = partial(InMemoryName, schemes=schemes) if marked else str
    model.config._name_or_path = kind(model.config.name_or_path)
    for module in model.modules():  # itself, and its base model
        if "name_or_path" in vars(module) and getattr(module, "config", None) is model.config:
            module.name_or_path = kind(module.name_or_path)
