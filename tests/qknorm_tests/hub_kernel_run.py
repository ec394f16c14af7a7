"""Run models with the kernel for the Hub, without the package: `python hub_kernel_run.py LOADER KERNEL FOLDER...`.

LOADER is "kernels" (the library, which reads LOCAL_KERNELS) or "file" (KERNEL as the library imports it, without the
library). Either way transformers' own code chooses the attention function and its masks. Writes logits, loss, gradients
and generated tokens to `kernel.safetensors` in each folder. Prints the kernel's modules.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

NAME = "org/qknorm-attention"


def load(variant: Path) -> ModuleType:
    """Import a build as the `kernels` library does: by its file, under the identifier in its metadata."""
    identifier = json.loads((variant / "metadata.json").read_text())["id"]
    if identifier not in sys.modules:
        spec = importlib.util.spec_from_file_location(identifier, variant / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[identifier] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[identifier])
    return sys.modules[identifier]


def accept_installed_kernels() -> None:
    """Make transformers accept the installed version of `kernels`, if it asks for another one."""
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        import_utils.is_kernels_available.__wrapped__.__defaults__ = ("0.16", "1")  # the oldest and the newest
        import_utils.is_kernels_available.cache_clear()


def load_without_kernels(kernel: Path) -> None:
    """Make transformers import the build for CPUs where it would call the `kernels` library."""
    from transformers.integrations import hub_kernels

    hub_kernels.is_kernels_available = lambda: True
    hub_kernels.get_kernel = lambda repo, **_: load(kernel / "build" / "torch-cpu")


def main(loader: str, kernel: Path, folders: list[Path]) -> None:
    sys.modules["hf_qknorm"] = None  # type: ignore[assignment]  # before anything that could import it
    if loader == "kernels":
        accept_installed_kernels()
    else:
        load_without_kernels(kernel)
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    if os.environ.get("TRITON_INTERPRET") == "1":
        from interpreter import install

        install()
    for folder in folders:
        batch = load_file(folder / "batch.safetensors")
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=NAME)
        result = model(**batch)
        result.loss.backward()
        found = {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
        found |= {"logits": result.logits.detach(), "loss": result.loss.detach()}
        tokens = {name: x[:, :12] for name, x in batch.items() if name != "labels"}
        for cache in ("dynamic", "static"):
            options = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
            found[cache] = model.generate(**tokens, max_new_tokens=4, do_sample=False, pad_token_id=0, **options)
        save_file({name: value.contiguous() for name, value in found.items()}, folder / "kernel.safetensors")
    sys.stdout.write(" ".join(name for name in sys.modules if name.startswith("_qknorm_attention_")))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [Path(argument) for argument in sys.argv[3:]])
