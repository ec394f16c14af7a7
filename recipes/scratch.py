"""Train from random weights with a scheme, or with QuacK or QK-Clip instead.

    python recipes/scratch.py
    python recipes/scratch.py --config gpt2 --tokenizer gpt2 --text corpus.txt --scheme qk_norm --learning_rate 1e-2
    torchrun --nproc-per-node 2 recipes/scratch.py --config gpt2 --tokenizer gpt2 --text corpus.txt --bf16 true

Without arguments the recipe trains a byte-level Llama of three million parameters on the source code of Python's
library; this takes a few minutes on a CPU. `--config` is a folder or a Hub name whose config gives the shape.
`--quack 1` sets QuacK's τ, which scales the steps of queries and keys by head. `--qk_clip 100` clips the heads whose
logits pass 100. Both need a scheme without norms (`--scheme none`). The recipe prints held-out losses as Markdown, and
writes the model, its tokenizer and `logits.jsonl`.
"""

from __future__ import annotations

from dataclasses import dataclass

import text_trainer as common
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.hf_argparser import HfArg

from hf_qknorm import QKClip, QuacK, patch_model
from hf_qknorm.small_model import byte_tokenizer, small_llama


@dataclass
class Options(common.TextOptions):
    """The recipe's options, beside the Trainer's arguments."""

    scheme: str = "qk_norm"
    config: str | None = HfArg(default=None, help="a folder or a Hub name: its config; default: a small Llama")
    tokenizer: str | None = HfArg(default=None, help="a folder or a Hub name; default: a token a byte")
    quack: float | None = HfArg(default=None, help="τ of QuacK's learning rates")
    qk_clip: float | None = HfArg(default=None, help="the largest |logit| that QK-Clip allows")


def main(command: list[str] | None = None) -> dict[str, float]:
    options, arguments = common.parse(Options, "qknorm-scratch", command)
    tokenizer = byte_tokenizer() if options.tokenizer is None else AutoTokenizer.from_pretrained(options.tokenizer)
    text = common.Text(options.text, options.length, tokenizer)
    if options.config is None:
        model = small_llama()
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.config, vocab_size=len(tokenizer)))
    patch_model(model, options.scheme)
    trainer = common.make_trainer(model, text, tokenizer, arguments, options.every)
    if options.quack is not None:
        QuacK.attach(trainer, options.quack)
    if options.qk_clip is not None:  # after the monitor, which must see logits before they are clipped
        trainer.add_callback(QKClip(model, options.qk_clip))
    return common.print_results(common.train_and_save(trainer, start="random weights"), trainer)


if __name__ == "__main__":
    main()
