"""Fine-tune a converted model with LoRA: patch, calibrate, wrap. The gains of the norms train as well.

    python recipes/lora.py
    python recipes/lora.py --checkpoint gpt2 --text corpus.txt --max_steps 500
    torchrun --nproc-per-node 2 recipes/lora.py --checkpoint gpt2 --text corpus.txt --bf16 true

Patch and calibrate before PEFT wraps the model: the norms then see the projections' output with the adapters' part.
Without arguments the recipe first trains a small Llama on the source code of Python's library; this takes a few minutes
on a CPU. It prints each stage and its held-out loss as it goes, and all losses as Markdown at the end. It writes the
adapter and, but under ZeRO-3, a merged model (`merged`) that loads without PEFT.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import peft
import text_trainer as common
from transformers.hf_argparser import HfArg
from transformers.integrations import is_deepspeed_zero3_enabled

from hf_qknorm import peft_modules_to_save


@dataclass
class Options(common.BaseOptions):
    """The recipe's options, beside the Trainer's arguments."""

    rank: int = HfArg(default=8, help="rank of the adapters")
    targets: str = HfArg(default="all-linear", help="modules with adapters: a pattern, or all-linear")


def main(command: list[str] | None = None) -> dict[str, float]:
    options, arguments = common.parse(Options, "qknorm-lora", command)
    model, tokenizer, text = common.start(options, arguments)
    common.convert(model, options, text, arguments)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules=options.targets,
        modules_to_save=peft_modules_to_save(model),
    )
    adapted = peft.get_peft_model(model, config)
    trained, total = adapted.get_nb_trainable_parameters()
    common.print_once(arguments, f"{trained:,} of {total:,} parameters are trained")
    trainer = common.make_trainer(adapted, text, tokenizer, arguments, options.every)
    losses = common.train_and_save(trainer, start="converted")
    if not is_deepspeed_zero3_enabled():  # no process has the weights to merge with
        trainer.model = adapted.merge_and_unload()
        common.add_loss(losses, "merged", trainer)
        merged = Path(arguments.output_dir) / "merged"
        trainer.save_model(str(merged))
        common.print_once(arguments, f"written: {merged}")
    return common.print_results(losses, trainer)


if __name__ == "__main__":
    main()
