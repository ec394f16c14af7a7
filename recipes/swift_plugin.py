"""ms-swift: name this file with `--external_plugins`, and a converted checkpoint with `--model`.

`--callbacks qk_norm_monitor` samples the logits, `--callbacks qk_clip` clips them, `--optimizer quack` steps by QuacK.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swift.callbacks import callbacks_map
from swift.optimizers import OptimizerCallback, optimizers_map

import hf_qknorm as qk  # which lets ms-swift load the checkpoint


class QuacKCallback(OptimizerCallback):
    def create_optimizer(self, model: Any = None) -> qk.QuacK:
        return qk.QuacK(super().create_optimizer(model), self.trainer.model)


callbacks_map["qk_norm_monitor"] = lambda args, trainer: qk.LogitMonitor(10, Path(args.output_dir) / "logits.jsonl")
callbacks_map["qk_clip"] = lambda args, trainer: qk.QKClip(trainer.model)
optimizers_map["quack"] = QuacKCallback
