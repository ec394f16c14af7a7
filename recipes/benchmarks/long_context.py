"""Measure long context before and after a conversion: loss by position, and copying over a distance.

    python recipes/benchmarks/long_context.py --text ../shared/data/tinyshakespeare.txt --checkpoints \
        ../shared/checkpoints/llama-shakespeare ../shared/checkpoints/gpt2-shakespeare --jobs 2

Published work (OlmPool: Bertsch et al. 2026, 26 models of 7B) finds that three or more of QK norm, GQA, sliding windows
and a short pretraining context together cost up to 47 % of the scores on long-context benchmarks after the context is
extended, and that losses on short text do not show it. Here two models of 3 M parameters, trained on rows of 256 bytes
of Shakespeare, are measured up to 1,024 positions (Llama) and 512 (GPT-2, whose learned positions end there).

A third model is the Llama after lessons in copying: 1,500 steps of 16×64 tokens, random spans repeated
with periods of 4 to 24, then 600 of 4×256, text with a random span of 16 to 64 twice in every other row; AdamW at 1e-3,
bf16 autocast, seed 0. The other two do not copy, as the page shows.

Positions: the mean loss over stretches of positions of 64 rows of the last tenth of the text, the same for every arm. A
rise is the mean over rows of the difference from the unpatched model, ± its standard error. Copying: a span of 32
stands at the start of a row of held-out text, and again after a distance at its end; random characters of the text's
alphabet, shuffled text, or natural text. The result is the share of the second copy's characters, without the first 4,
that the model thinks most likely.

Arms: the scheme qk_norm_cap, calibrated on 128 rows of 256 from the first nine tenths of the text, by moments with
fixed knees and with the knee that `calibrate` finds; knee 0 and the found knee on the same number of tokens in rows of
the longest length; and a cap alone. "Length scale" is
`Scheme(length_scale=256)`: queries multiplied by log n / log 256, for the unpatched model, knee 0 and the found knee.

After training: the model that copies, by the same arms with and without a length scale, is trained on for 120 steps at
3e-4, either "extended" (1×1,024 tokens a step) or "at the trained length" (4×256; without the found knee), on text in
which a random span stands twice, in bf16 autocast; 3 seeds, all arms of a seed on the same rows; 24 rows measure it.

Rules, fixed before the runs. An arm loses long context if its rise beyond the trained length is more than 0.01 nats
above its rise within it, and more than twice the standard error of that difference. A model copies if at the shortest
distance it predicts half of the second copy's characters right. An arm loses copying at a distance if its share of
right characters is more than 0.05 below the unpatched model's, and more than twice the standard error of that.

The same rules hold after training, against the unpatched model trained alike, with differences over seeds in the place
of rows, and all distances beyond the trained length together. A length scale helps an arm if the loss beyond the
trained length is more than 0.01 nats below the same arm's without it, or the copying there more than 0.05 above, by
more than twice the standard error.

An interrupted measurement continues where it stopped. Writes a page, its runs and a plot.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from long_context_arms import ARMS, SIZES, Source, convert, measure
from long_context_page import BASE, page
from long_context_plots import plot
from long_context_tasks import KINDS, Draw, mixed_rows, short_rows, train
from long_context_training import train_on, wanted_trainings
from run_log import Row, Runs, provenance
from transformers import AutoTokenizer, HfArgumentParser

from hf_qknorm.files.atomic_io import new_folder, replace_text


@dataclass
class Options:
    """The options of the measurement."""

    checkpoints: list[str]
    text: str
    size: str = field(default="full", metadata={"choices": list(SIZES)})
    seeds: int = 3  # of the trainings
    jobs: int = 1
    minutes: float = math.inf
    taught: Path = Path("build/taught")  # folder for the model that is taught to copy
    out: Path = Path("recipes/results/long_context")


def run_one(sources: dict[str, Source], settings: Row) -> Row:
    """Convert a model by an arm, perhaps train it, and measure it."""
    logging.getLogger("hf_qknorm").setLevel(logging.ERROR)
    torch.manual_seed(0)
    source = sources[settings["model"]]
    model, arm, size = source.model(), settings["arm"], source.size
    seen, held_out = source.tokens()
    convert(model, ARMS[arm], seen, size)
    if settings.get("part") == "training":
        return train_on(model, seen, held_out, settings, size)
    return measure(model.eval(), held_out, size, size.rows, KINDS if arm == BASE else KINDS[:1])


def teach(source: Source, folder: Path) -> None:
    """Write a copy of the model, taught to copy, to `folder`."""
    torch.manual_seed(0)
    model, tokenizer = source.model(), AutoTokenizer.from_pretrained(source.checkpoint)
    draw, size = Draw(source.tokens()[0], seed=0), source.size
    for stage, rows in ((size.short, short_rows), (size.mixed, mixed_rows)):
        for step, loss in enumerate(train(model, draw, stage, rows), start=1):
            if step % 100 == 0:
                print(f"lessons of {stage.length} tokens, step {step}: {loss:.3f}", flush=True)
    with new_folder(folder, lambda: None) as new:
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)


def all_sources(options: Options) -> dict[str, Source]:
    """The checkpoints by name, and at the end the first with RoPE again, taught to copy."""
    size = SIZES[options.size]
    sources = {Path(at).name: Source(Path(at).name, at, options.text, size) for at in options.checkpoints}
    rotary = next(source for source in sources.values() if hasattr(source.model().config, "rope_parameters"))
    taught = replace(rotary, name=f"{rotary.name}, taught to copy", checkpoint=str(options.taught / rotary.name))
    return {**sources, taught.name: taught}


def run_missing(options: Options, sources: dict[str, Source], wanted: list[Row], runs: Runs) -> None:
    """Run what the log lacks; teach the model that copies, if it is needed and not there."""
    *others, taught = sources.values()
    known = [row["settings"] for row in runs.rows]
    needed = any(settings["model"] == taught.name and settings not in known for settings in wanted)
    if needed and not Path(taught.checkpoint).exists():
        name = Path(taught.checkpoint).name
        teach(next(source for source in others if source.name == name), Path(taught.checkpoint))
    runs.run_all(wanted, partial(run_one, sources), options.jobs, options.minutes)


def main(arguments: list[str] | None = None) -> str:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses(arguments)
    torch.set_num_threads(1)
    size, sources = SIZES[options.size], all_sources(options)
    runs = Runs(options.out.with_suffix(".jsonl"))
    wanted = [{"model": name, "arm": arm, **asdict(size)} for name in sources for arm in ARMS]
    trained = wanted_trainings(list(sources)[-1], options.size, options.seeds)
    run_missing(options, sources, [*wanted, *trained], runs)
    known = [row["settings"] for row in runs.rows]
    sections: dict[str, dict[str, Row]] = {}
    for settings in wanted:
        if settings in known:
            sections.setdefault(settings["model"], {})[settings["arm"]] = runs.get(settings, dict)
    sections = {name: found for name, found in sections.items() if BASE in found}
    if not sections:
        return "no unpatched model is measured yet"
    trainings = [(settings, runs.get(settings, dict)) for settings in trained if settings in known]
    plotted = options.out.with_suffix(".png")
    plot(sections, size.length, plotted)
    description = (__doc__ or "").partition("--jobs 2\n\n")[2].rpartition("\n\n")[0]
    text = page(sections, trainings, size.length, description, provenance(runs.used), plotted.name)
    replace_text(options.out.with_suffix(".md"), text)
    print(text)
    return text


if __name__ == "__main__":
    main()
