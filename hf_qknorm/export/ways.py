"""The ways to serve a patched checkpoint: what each costs, and its command."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from typing import Any, Final

from hf_qknorm.checkpoint.source import Source, open_source
from hf_qknorm.export.native import check_exportable, plan_export
from hf_qknorm.families import FAMILIES
from hf_qknorm.files.names import CODE_FILE
from hf_qknorm.files.paths import user_path

INEXACT: Final = "inexact: the loss before and after is printed"
_LOAD_CODE: Final = "AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)"
_LOAD: Final = "import hf_qknorm; AutoModelForCausalLM.from_pretrained(...)"


@dataclass(frozen=True)
class Way:
    """A way to serve a checkpoint. `cost` is what is lost, or why it is not possible; `command` is None then."""

    name: str
    cost: str
    command: str | None


def serving_ways(src: str | os.PathLike[str]) -> list[Way]:
    """The ways to serve the patched checkpoint in the folder `src`. Nothing is written; of weights, headers are read.

    Raises ValueError or FileNotFoundError for what is no complete patched checkpoint.
    """
    folder = user_path(src, "src")
    with open_source(folder) as source:
        check_exportable(folder, source.config)
        source.check_complete()
        config: Any = source.config
        here = shlex.quote(str(folder))
        lost = [] if config.attn_logit_softcapping is None else [f"the cap of {config.attn_logit_softcapping:g}"]
        lost += ["the position bias"] if FAMILIES[config.base_model_type].style.bias else []
        batched = f"refused: continuous batching drops {lost[0]}" if lost else "exact"
        biased = (
            "refused: it drops the position bias" if "the position bias" in lost else "exact, or refused at the start"
        )
        own_code = (folder / CODE_FILE).is_file()
        trust = " --trust-remote-code" if own_code else ""  # else vLLM takes the package, by its plugin
        sglang = "exact by its source, not run; windows are refused"
        if lost:
            sglang = f"refused: it drops {lost[0]}"
        elif not own_code:
            sglang = "refused: it needs the model's code beside the weights (add_standalone)"
        ways = [
            Way("transformers", "exact", _LOAD_CODE if own_code else _LOAD),
            _way("transformers, batched", batched, "model.generate_batch(...)"),
            Way("transformers serve", "refused: it loads transformers' own classes alone; serve an export", None),
            _way("vLLM", biased, f"vllm serve {here} --model-impl transformers{trust}"),
            _way("SGLang", sglang, f"sglang serve --model-path {here} --model-impl transformers --trust-remote-code"),
            _export(source, f"hf-qknorm export {here} DST", "exact", end=False),
        ]
        if config.scheme.norms:
            ways.append(_export(source, f"hf-qknorm export {here} DST --texts TEXT", INEXACT, end=True))
        return ways


def _way(name: str, cost: str, command: str) -> Way:
    return Way(name, cost, None if cost.startswith("refused") else command)


def _export(source: Source, command: str, cost: str, *, end: bool) -> Way:
    """An export as a plain model, for any engine, llama.cpp too; the norms taken off with `end`."""
    without = ", without norms" if end else ""
    try:
        planned = plan_export(source, end_norms=end)
    except ValueError as error:
        return Way(f"any engine{without}", f"refused: {error}", None)
    return Way(f"any engine, as {planned.config.architectures[0]}{without}", cost, command)


def ways_text(ways: list[Way]) -> str:
    """The ways as lines of text, each with its command below it."""
    width = max(len(way.name) for way in ways) + 2
    return "\n".join(
        f"{way.name:{width}}{way.cost}" + (f"\n{'':{width}}{way.command}" if way.command else "") for way in ways
    )
