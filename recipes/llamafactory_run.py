"""LLaMA-Factory: train a converted checkpoint, and sample its logits.

python recipes/llamafactory_run.py train.yaml, with the checkpoint's folder as `model_name_or_path`. For LoRA,
`additional_target: q_norm,k_norm` trains the gains and saves them with the adapter.
"""

from llamafactory.train.tuner import run_exp

import hf_qknorm as qk  # which lets LLaMA-Factory load the checkpoint

run_exp(callbacks=[qk.LogitMonitor(every=10, path="logits.jsonl")])
