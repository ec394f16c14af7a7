"""The sound checkpoints that are broken."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAYOUTS = {"single": None, "sharded": "24KB"}  # the largest shard
SIZES = {"vocab_size": 257, "hidden_size": 32, "head_dim": 8, "intermediate_size": 48}
TOKENS = list(b"to be or not to be")  # what logits are compared on


@dataclass(frozen=True)
class Base:
    """A tiny model of `model_type`, patched with `scheme` (None: not patched), with a `blend` that has begun."""

    name: str
    model_type: str
    scheme: Any = None
    blend: float | None = None
    exports: bool = False

    @property
    def auto(self) -> str:
        """The Auto class that loads it."""
        return "AutoModel" if self.model_type == "bert" else "AutoModelForCausalLM"


PLAIN = ("llama", "gpt2", "mistral", "qwen2", "mixtral", "gpt_neox", "gemma2", "bert")
BIASED = {"q": "rms", "k": "rms", "gain": "per_head", "bias": True}
BASES = {
    base.name: base
    for base in (
        *(Base(name, name) for name in PLAIN),
        Base("llama-qk_norm", "llama", "qk_norm", exports=True),
        Base("llama-qk_norm_cap", "llama", "qk_norm_cap"),
        Base("llama-blend", "llama", "qk_norm_cap", blend=0.5),
        Base("llama-knee", "llama", {"q": "rms", "k": "rms", "knee": 4.0}),
        Base("gpt2-knee", "gpt2", {"q": "layer", "k": "l2", "v": "lp", "p": 3.0, "gain": "per_head", "knee": 0.5}),
        Base("gpt2-henry", "gpt2", "henry"),
        Base("mistral-lp", "mistral", "lp"),
        Base("qwen2-qkv_norm", "qwen2", "qkv_norm"),
        Base("mixtral-per_head", "mixtral", BIASED),
        Base("gpt_neox-layer", "gpt_neox", {"q": "layer", "k": "layer"}, exports=True),
        Base("gemma2-soft_cap", "gemma2", {"softcap": 20.0}, exports=True),
        Base("bert-qk_norm", "bert", "qk_norm"),
    )
}


def whole(root: Path, base: Base, layout: str) -> Path:
    """Return the folder of a sound checkpoint."""
    return root / "bases" / base.name / layout


def twin(root: Path, base: Base, layout: str) -> Path:
    """Return the folder of a checkpoint before it was patched: the checkpoint itself, if it is not patched."""
    return root / "bases" / base.name / (layout if base.scheme is None else f"unpatched-{layout}")


def build(root: Path) -> None:
    """Write every base, in every layout, under `root`."""
    import test_helpers_path  # noqa: F401
    import torch
    from transformers import AutoModel
    from transformers.utils import logging

    from hf_qknorm import patch_model
    from hf_qknorm.demo.training import byte_tokenizer
    from hf_qknorm.model.norms import HeadNorm
    from hf_qknorm.training.blend import set_blend
    from qknorm_tests.tiny import tiny_model

    logging.disable_progress_bar()
    tokenizer = byte_tokenizer()

    def save(model: Any, folder: Path, shard: str | None) -> None:
        model.save_pretrained(folder, **({} if shard is None else {"max_shard_size": shard}))
        tokenizer.save_pretrained(folder)
        for path in folder.iterdir():
            path.chmod(0o644)

    for seed, base in enumerate(BASES.values()):
        model: Any = tiny_model(base.model_type, seed=seed, **SIZES)
        if base.auto == "AutoModel":
            torch.manual_seed(seed)
            model = AutoModel.from_config(model.config).eval()  # the language model's own has no pooler
        for layout, shard in LAYOUTS.items():
            save(model, twin(root, base, layout), shard)
        if base.scheme is None:
            continue
        patch_model(model, base.scheme)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if name.split(".")[-2] in ("q_norm", "k_norm", "v_norm"):  # no gain is 1, so that a lost one is seen
                noise = torch.rand(parameter.shape, generator=generator)
                parameter.data = 1.5 + noise if name.endswith("weight") else noise
        for norm in (module for module in model.modules() if isinstance(module, HeadNorm) and module.knee):
            norm.set_knee(norm.knee, 0.1 + float(torch.rand((), generator=generator)))
        if base.blend is not None:
            set_blend(model, base.blend)
        for layout, shard in LAYOUTS.items():
            save(model, whole(root, base, layout), shard)
