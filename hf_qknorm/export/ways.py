"""The ways to serve a patched checkpoint: what each costs, and its command."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from typing import Any, Final

from hf_qknorm.checkpoint.source import Source, open_source
from hf_qknorm.export.native import check_exportable, plan_export
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
        cap = config.attn_logit_softcapping
        batched = "exact" if cap is None else f"refused: continuous batching drops the cap of {cap:g}"
        own_code = (folder / CODE_FILE).is_file()
        trust = " --trust-remote-code" if own_code else ""  # else vLLM takes the package, by its plugin
        ways = [
            Way("transformers", "exact", _LOAD_CODE if own_code else _LOAD),
            Way("transformers, batched", batched, None if cap is not None else "model.generate_batch(...)"),
            Way("transformers serve", "refused: it loads transformers' own classes alone; serve an export", None),
            Way("vLLM", "exact, or refused at the start", f"vllm serve {here} --model-impl transformers{trust}"),
            _export(source, f"hf-qknorm export {here} DST", "exact", end=False),
        ]
        if config.scheme.norms:
            ways.append(_export(source, f"hf-qknorm export {here} DST --texts TEXT", INEXACT, end=True))
        return ways


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
