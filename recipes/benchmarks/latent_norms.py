"""What norms cost a trained model with latent attention, and what they do at a high learning rate.

    python recipes/benchmarks/latent_norms.py --text tinyshakespeare.txt

A Youtu (DeepSeek V3's attention, dense MLPs) of 4 layers trains from random weights: 400 steps of 8×128 tokens (bytes)
from the first nine tenths of the text, AdamW at a rate of 0.003 with weight decay 0.1 on matrices, gradients clipped at
1, 40 steps of warm-up. It is then converted to `qk_norm` in each way, by 32 other batches of the same part, and judged
on 16 batches of the last tenth, which no calibration sees. The cost is the rise in loss above the unpatched model's.
After that it is trained on, for 100 steps at a rate of 0.03 with 10 steps of warm-up: unpatched, with QK-Clip at 30,
and as `qk_norm` with the knee that "auto" found. Within a seed all see the same batches.

Before the runs these rules were fixed. Calibration works if "auto" leaves at most a tenth of the cost of fresh gains,
in every seed. A difference at the high rate counts if it is more than twice its standard error over the seeds.
An interrupted comparison continues where it stopped. Writes a page and its runs; prints Markdown.
"""

from __future__ import annotations

import copy
import statistics
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import study
import torch
from markdown_table import table
from paired import Difference
from run_log import Row, Runs, provenance
from torch import Tensor
from transformers import YoutuConfig, YoutuForCausalLM

from hf_qknorm import QKClip, calibrate, patch_model
from hf_qknorm.demo.training import mean_loss, train
from hf_qknorm.measure.bounds import worst_bound
from hf_qknorm.measure.logit_statistics import logit_statistics
from hf_qknorm.measure.predictions import predictions
from hf_qknorm.measure.text import sample_batches

# The ways to convert: method and knee of `calibrate`.
WAYS: Final[dict[str, tuple[str | None, float | str]]] = {
    "fresh gains": ("ones", 0.0),
    "moments": ("moments", 0.0),
    "moments, knee 2": ("moments", 2.0),
    "moments, knee 4": ("moments", 4.0),
    "auto": ("moments", "auto"),
}
ARMS = ("unpatched", "QK-Clip at 30", "qk_norm, auto")
SHARE = 0.1  # of the cost of fresh gains that "auto" may leave


@dataclass(frozen=True)
class Size:
    """The model and the lengths of the runs."""

    layers: int = 4
    width: int = 128
    steps: int = 400
    warmup: int = 40
    rate: float = 0.003
    more: int = 100
    high: float = 0.03
    batch: int = 8
    length: int = 128
    calibrated: int = 32
    judged: int = 16


QUICK = Size(layers=1, width=32, steps=4, warmup=2, more=3, batch=2, length=32, calibrated=12, judged=2)
SIZES = {"quick": QUICK, "full": Size()}


@dataclass(kw_only=True)
class Options(study.Options):
    """The options of the comparison."""

    out: Path = Path("recipes/results/latent_norms")


def small_youtu(size: Size) -> YoutuForCausalLM:
    """A Youtu with random weights, over bytes: 4 heads with as many channels without RoPE as latents per head."""
    head, latent = size.width // 4, size.width // 2
    parts = {"qk_nope_head_dim": head, "qk_rope_head_dim": head // 2, "v_head_dim": head}
    shape = {"hidden_size": size.width, "intermediate_size": size.width * 11 // 4, "num_hidden_layers": size.layers}
    latents = {"q_lora_rank": latent, "kv_lora_rank": latent}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True}
    settings = {**parts, **shape, **latents, **heads, **ends}
    return YoutuForCausalLM(YoutuConfig(vocab_size=257, max_position_embeddings=2 * size.length, **settings))


def run_seed(text: dict[str, Tensor], size: Size, seed: int) -> Row:
    """Train a model, convert it in each way, and train it on in each arm."""
    torch.manual_seed(seed)
    model: Any = small_youtu(size)

    def batches(part: str, count: int, start: int) -> list[Tensor]:
        return sample_batches(text[part], count, size.batch, size.length, seed=start + seed)

    train(model, batches("seen", size.steps, 100), rate=size.rate, warmup=size.warmup, desc=None)
    model.eval()
    known, judged = batches("seen", size.calibrated, 200), batches("held_out", size.judged, 300)
    found: Row = {"base": round(mean_loss(model, judged), 4), "ways": {}, "arms": {}}
    for way, (method, knee) in WAYS.items():
        patched = patch_model(copy.deepcopy(model), "qk_norm")
        calibrate(patched, known, method, knee=knee)  # type: ignore[arg-type]
        base, own = predictions(patched, [{"input_ids": batch} for batch in judged])
        assert base is not None
        assert own is not None
        row = {"rise": own.loss - base.loss, "kl": own.kl, "bound": worst_bound(patched)}
        found["ways"][way] = {"knee": patched.config.scheme.knee, **{k: round(x, 4) for k, x in row.items()}}
    more = batches("seen", size.more, 400)
    for arm in ARMS:
        copied = copy.deepcopy(model) if arm == "unpatched" else patched
        clip = None
        if arm == "QK-Clip at 30":
            copied = patch_model(copy.deepcopy(model), "none")
            clip = QKClip(copied, threshold=30.0)

        def each_step(step: int, clip: QKClip | None = clip) -> None:
            if clip is not None:
                clip.step()

        train(copied, more, rate=size.high, warmup=max(size.more // 10, 1), desc=None, each_step=each_step)
        copied.eval()
        with torch.no_grad(), logit_statistics(copied) as seen:
            loss = mean_loss(copied, judged)
        largest = max(float(layer.max_logit.max()) for layer in seen.values())
        found["arms"][arm] = {"loss": round(loss, 4), "logit": round(largest, 2)}
    return found


def page(size: Size, results: list[Row], runs: Runs) -> str:
    """The comparison as Markdown."""
    losses = ", ".join(f"{row['base']:.3f}" for row in results)
    made = f"`{size}`, {len(results)} seeds; {provenance(runs.used)}"
    lines = study.opening("Norms of latent attention", __doc__, made)
    lines += [
        f"The held-out losses of the unpatched models are {losses}. Costs of the conversions in nats, means over the "
        "seeds (and each seed's):",
        "",
    ]
    rows = []
    for way in WAYS:
        found = [row["ways"][way] for row in results]
        each = ", ".join(f"{row['rise']:+.4f}" for row in found)
        mean = {name: statistics.mean(row[name] for row in found) for name in ("rise", "kl", "bound")}
        knees = ", ".join(dict.fromkeys(f"{row['knee']:g}" for row in found))
        rows.append([way, knees, f"{mean['rise']:+.4f} ({each})", f"{mean['kl']:.4f}", f"{mean['bound']:.0f}"])
    lines += table(["gains", "knee", "rise in loss", "KL", "bound"], rows, align="lrrrr")
    lines += [verdict(results), "", "Trained on at the high rate:\n"]
    rows, plain, verdicts = [], [row["arms"]["unpatched"]["loss"] for row in results], []
    for arm in ARMS:
        found = [row["arms"][arm] for row in results]
        each = ", ".join(f"{row['loss']:.3f}" for row in found)
        apart = Difference.of([row["loss"] for row in found], plain)
        mean = {name: statistics.mean(row[name] for row in found) for name in ("loss", "logit")}
        is_base = arm == ARMS[0]
        rows.append([arm, f"{mean['loss']:.3f} ({each})", "" if is_base else str(apart), f"{mean['logit']:.1f}"])
        verdicts += [] if is_base else [f"{arm} {apart.verdict}"]
    head = ["arm", "held-out loss (of each seed)", "less that of the unpatched", "largest \\|logit\\|"]
    ending = f"By the rule, against the unpatched model: {'; '.join(verdicts)}."
    return "\n".join([*lines, *table(head, rows, align="lrrr"), ending]) + "\n"


def verdict(results: list[Row]) -> str:
    """Whether calibration works by the rule, as a sentence."""
    left = [row["ways"]["auto"]["rise"] / row["ways"]["fresh gains"]["rise"] for row in results]
    works = all(share <= SHARE for share in left)
    shares = ", ".join(f"{share:.1%}" for share in left)
    return (
        f'"auto" leaves {shares} of the cost of fresh gains: by the rule calibration {"works" if works else "fails"}.'
    )


def main(command: list[str] | None = None) -> str:
    options, runs = study.parse(Options, command)
    size, (text, characters), results = SIZES[options.size], study.bytes_of(options.text), []
    for seed in range(options.seeds):
        settings = {**asdict(size), "seed": seed, "characters": characters}
        results.append(runs.get(settings, partial(run_seed, text, size, seed)))
        print(f"seed {seed}: {results[-1]}", flush=True)
    return study.publish(page(size, results, runs), options.out)


if __name__ == "__main__":
    main()
