"""Run stand-alone checkpoints without the package: `python without_package.py FOLDER...`, each with a batch.

Writes logits, loss, gradients and generated tokens to `alone.safetensors` in each folder. Also saves each model to
`again` in its folder, loads it from there, and writes its logits.
"""

import sys
from pathlib import Path

sys.modules["hf_qknorm"] = None  # type: ignore[assignment]  # before anything that could import it

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, dynamic_module_utils  # noqa: E402


def imports_once() -> None:
    """Let transformers look for the imports of code that it has seen, in another folder, only once."""
    look, seen = dynamic_module_utils.get_imports, {}

    def get_imports(file: str) -> list[str]:
        code = Path(file).read_bytes()
        if code not in seen:
            seen[code] = look(file)
        return seen[code]

    dynamic_module_utils.get_imports = get_imports


def main(folders: list[Path]) -> None:
    imports_once()
    for folder in folders:
        batch = load_file(folder / "batch.safetensors")
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        if not type(model).__module__.startswith("transformers_modules"):
            raise SystemExit(f"{folder}: {type(model).__module__} is not the checkpoint's own code")
        result = model(**batch)
        result.loss.backward()
        found = {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
        found |= {"logits": result.logits.detach(), "loss": result.loss.detach()}
        tokens = batch["input_ids"][:1, -8:]
        found["generated"] = model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)
        model.save_pretrained(folder / "again")
        again = AutoModelForCausalLM.from_pretrained(folder / "again", trust_remote_code=True)
        with torch.no_grad():
            found["logits again"] = again(**batch).logits
        save_file({name: value.contiguous() for name, value in found.items()}, folder / "alone.safetensors")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
