"""Continue pretraining of a converted model: patch, calibrate, train on, watch logits.

    python recipes/pretrain.py
    python recipes/pretrain.py --checkpoint gpt2 --text corpus.txt --scheme qk_norm_cap --max_steps 2000
    torchrun --nproc-per-node 2 recipes/pretrain.py --checkpoint gpt2 --text corpus.txt --bf16 true

Without arguments the recipe first trains a small Llama on the source code of Python's library; this takes a few minutes
on a CPU. All arguments of the Trainer work (`--learning_rate`, `--bf16`, `--save_strategy steps`,
`--resume_from_checkpoint`, …). It prints held-out losses as Markdown, and writes the model, its tokenizer and
`logits.jsonl`, which `hf-qknorm monitor` plots.
"""

from __future__ import annotations

from dataclasses import dataclass

import text_trainer as common
from transformers.hf_argparser import HfArg

from hf_qknorm import KneeSchedule


@dataclass
class Options(common.BaseOptions):
    """The recipe's options, beside the Trainer's arguments."""

    share: float = HfArg(default=0.0, help="share of the run over which the knee is lowered to 0; 0: it stays")


def main(command: list[str] | None = None) -> dict[str, float]:
    options, arguments = common.parse(Options, "qknorm-pretrain", command)
    model, tokenizer, text = common.start(options, arguments)
    report = common.convert(model, options, text, arguments)
    lowered = options.share and (report is None or report.knee)  # a converted checkpoint has its own knee
    callbacks = [KneeSchedule(share=options.share)] if lowered else []
    if lowered:
        common.print_once(arguments, f"the knee is lowered to 0 over {options.share:.0%} of the run")
    trainer = common.make_trainer(model, text, tokenizer, arguments, options.every, callbacks=callbacks)
    return common.print_results(common.train_and_save(trainer, start="converted"), trainer)


if __name__ == "__main__":
    main()
