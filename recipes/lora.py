"""A LoRA fine-tune of a converted model: patch, calibrate, wrap; the gains of the norms are trained along.

    python recipes/lora.py
    python recipes/lora.py --checkpoint gpt2 --text corpus.txt --scheme qk_norm --max_steps 500
    torchrun --nproc-per-node 2 recipes/lora.py --checkpoint gpt2 --text corpus.txt --bf16 true

The order matters: patched and calibrated first, wrapped by PEFT then, so that the norms see what the adapters add.
Without arguments a small Llama, trained for it on the sources of Python's library: some minutes of a CPU. Prints the
held-out losses as Markdown; writes the adapter, and the merged model to `merged`, which loads without PEFT.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import peft
from text_trainer import BaseOptions, held_out_loss, make_trainer, parse, say, start, told, train_and_save

from hf_qknorm import Scheme, calibrate, patch_model, peft_modules_to_save


@dataclass
class Options(BaseOptions):
    """What the recipe can be told, beside the Trainer's arguments."""

    scheme: str = "qk_norm"
    rank: int = field(default=8, metadata={"help": "of the adapters"})
    targets: str = field(default="all-linear", metadata={"help": "what they stand on: a pattern, or all-linear"})


def main(command: list[str] | None = None) -> dict[str, float]:
    options, arguments = parse(Options, "qknorm-lora", command)
    model, tokenizer, text = start(options, arguments)
    patch_model(model, Scheme.of(options.scheme))
    batches = text.batches(options.calibration, arguments.per_device_train_batch_size, arguments.seed + 1)
    say(arguments, calibrate(model, batches, options.method))
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules=options.targets,
        modules_to_save=peft_modules_to_save(model),
    )
    adapted = peft.get_peft_model(model, config)
    trained, all_of_it = adapted.get_nb_trainable_parameters()
    say(arguments, f"trained are {trained:,} of {all_of_it:,} parameters")
    trainer = make_trainer(adapted, text, tokenizer, arguments, options.every)
    losses = {f"{options.scheme}, calibrated": held_out_loss(trainer)}
    train_and_save(trainer, losses)
    trainer.model = adapted.merge_and_unload()
    losses["merged"] = held_out_loss(trainer)
    trainer.save_model(str(Path(arguments.output_dir) / "merged"))
    say(arguments, told(losses, trainer))
    return losses


if __name__ == "__main__":
    main()
