"""Continue a model's training with MuonClip: Muon on its matrices, AdamW on the rest, QK-Clip on its heads.

    python recipes/muon_clip.py
    python recipes/muon_clip.py --checkpoint gpt2 --text corpus.txt --threshold 100 --max_steps 500
    torchrun --nproc-per-node 2 recipes/muon_clip.py --checkpoint gpt2 --text corpus.txt --bf16 true

Muon steps along the orthogonalised momentum of a matrix. With Moonlight's factor 0.2·√max(rows, columns) a step has the
size of one of AdamW's, so that both share the learning rate, its schedule and the weight decay. Embeddings, the output
head, gains and biases have AdamW. A projection to queries, keys and values at once, as GPT-2's, is orthogonalised as
one matrix. `--threshold` is the largest logit that QK-Clip allows; 0 leaves it out, as for models whose queries and
keys have norms. Without `--checkpoint` the recipe first trains a small Llama on the source code of Python's library;
this takes a few minutes on a CPU. It prints held-out losses as Markdown.

Sources: Kimi K2 (arXiv 2507.20534), Moonlight (arXiv 2502.16982).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import text_trainer as common
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from transformers.hf_argparser import HfArg

from hf_qknorm import QKClip, patch_model


@dataclass
class Options(common.BaseOptions):
    """The recipe's options, beside the Trainer's arguments."""

    scheme: str = "none"
    threshold: float = HfArg(default=100.0, help="the largest logit; 0: no QK-Clip")


class MuonAndAdamW(Optimizer):
    """Two optimisers as one, for the Trainer: the first parameter group is Muon's, the others are AdamW's."""

    def __init__(self, muon: Muon, adamw: AdamW) -> None:
        self.muon, self.adamw = muon, adamw
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let both parts use the groups and the state of this optimiser, which schedules and checkpoints know."""
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self.muon.state = self.adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = self.muon.step(closure)
        self.adamw.step()
        return loss


def make_optimizer(model: nn.Module, arguments: common.Arguments) -> MuonAndAdamW:
    """Muon for the matrices of hidden layers, AdamW for all other parameters."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    ends = {id(weight) for weight in (*embeddings, model.get_output_embeddings().weight)}
    trained = [p for p in model.parameters() if p.requires_grad]
    hidden = [p for p in trained if p.dim() == 2 and id(p) not in ends]
    shared: dict[str, Any] = {"lr": arguments.learning_rate, "weight_decay": arguments.weight_decay}
    others = [
        {"params": [p for p in trained if id(p) in ends or p.dim() > 2]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (arguments.adam_beta1, arguments.adam_beta2)
    adamw = AdamW([group for group in others if group["params"]], betas=betas, eps=arguments.adam_epsilon, **shared)
    return MuonAndAdamW(Muon(hidden, adjust_lr_fn="match_rms_adamw", **shared), adamw)


def main(command: list[str] | None = None) -> dict[str, float]:
    options, arguments = common.parse(Options, "qknorm-muon", command)
    model, tokenizer, text = common.start(options, arguments)
    patch_model(model, options.scheme)
    optimizer = make_optimizer(model, arguments)
    for name, groups in (("Muon", optimizer.muon.param_groups), ("AdamW", optimizer.adamw.param_groups)):
        count = sum(p.numel() for group in groups for p in group["params"])
        common.print_once(arguments, f"{name}: {count:,} parameters")
    trainer = common.make_trainer(model, text, tokenizer, arguments, options.every, optimizers=(optimizer, None))
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError("DeepSpeed and FSDP divide matrices, which Muon needs whole: use one process, or DDP")
    if options.threshold:  # after the monitor, which must see logits before they are clipped
        trainer.add_callback(QKClip(model, options.threshold))
    return common.print_results(common.train_and_save(trainer, start="start"), trainer)


if __name__ == "__main__":
    main()
