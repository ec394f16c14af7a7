"""Continue pretraining of a converted model: patch, calibrate, lower the knee over half of the run, watch logits.

    python recipes/pretrain.py
    python recipes/pretrain.py --checkpoint gpt2 --text corpus.txt --scheme qk_norm_cap --max_steps 2000
    torchrun --nproc-per-node 2 recipes/pretrain.py --checkpoint gpt2 --text corpus.txt --bf16 true

Without arguments the recipe first trains a small Llama on the source code of Python's library; this takes a few minutes
on a CPU. All arguments of the Trainer work (`--learning_rate`, `--bf16`, `--save_strategy steps`,
`--resume_from_checkpoint`, …). It prints held-out losses as Markdown, and writes the model, its tokenizer and
`logits.jsonl`, which `hf-qknorm monitor` plots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from text_trainer import BaseOptions, add_loss, make_trainer, parse, print_once, results_table, start, train_and_save

from hf_qknorm import KneeSchedule, Scheme, calibrate, patch_model


@dataclass
class Options(BaseOptions):
    """The recipe's options, beside the Trainer's arguments."""

    share: float = field(
        default=0.5, metadata={"help": "share of the run over which the knee is lowered to 0; 0: it stays"}
    )


def main(command: list[str] | None = None) -> dict[str, float]:
    options, arguments = parse(Options, "qknorm-pretrain", command)
    model, tokenizer, text = start(options, arguments)
    patch_model(model, Scheme.of(options.scheme))
    batches = text.batches(options.calibration, arguments.per_device_train_batch_size, arguments.seed + 1)
    print_once(arguments, f"calibrating {options.scheme} on {options.calibration} batches")
    print_once(arguments, report := calibrate(model, batches))
    callbacks = [KneeSchedule(share=options.share)] if options.share and report.knee else []
    trainer = make_trainer(model, text, tokenizer, arguments, options.every, callbacks=callbacks)
    losses: dict[str, float] = {}
    add_loss(losses, f"{options.scheme}, calibrated", trainer)
    train_and_save(trainer, losses)
    print_once(arguments, results_table(losses, trainer))
    return losses


if __name__ == "__main__":
    main()
