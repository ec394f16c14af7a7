"""A check of an adapter's weights: the gains of a patched model's norms need these norms in the base model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final

GAINS: Final = tuple(f".{norm}_norm.{kind}" for norm in "qkv" for kind in ("weight", "bias"))
PREFIX: Final = "base_model.model."  # of the names in an adapter


def keeps_gains(load: Callable[..., Any]) -> Callable[..., Any]:
    """Let PEFT's `set_peft_model_state_dict` refuse gains that it would leave out, for lack of a norm in the model.

    Raises ValueError before anything is loaded.
    """

    @wraps(load)
    def checked(model: Any, peft_model_state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        gains = [name for name in peft_model_state_dict if name.endswith(GAINS)]
        modules = {path for path, _ in model.named_modules()} if gains else set()
        for name in gains:
            path = name.rpartition(".")[0].removeprefix(PREFIX)
            if not {path, PREFIX + path} & modules:
                base = model.get_base_model() if hasattr(model, "get_base_model") else model
                raise ValueError(
                    f"the adapter holds {name}, the gain of a norm that this {type(base).__name__} does not have: it "
                    "was trained on a patched model. Load it onto that model: from the folder where the patched model "
                    "was saved, or patched with the same scheme"
                )
        return load(model, peft_model_state_dict, *args, **kwargs)

    return checked
