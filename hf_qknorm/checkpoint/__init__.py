"""Checkpoints on the disk: opened, checked, rewritten shard by shard, and written to safe destinations.

Where a checkpoint is refused, in the order of the checks of a conversion:

- `source.py`: no folder and no name on the Hub, an adapter, pickled weights, weights that transformers would not read
- `config.py`: config.json is missing, damaged, or names no class of transformers; settings that do not load again
- `hf_qknorm/model/config_checks.py`: a value of config.json with which no model can be built
- `copied_files.py`: a damaged tokenizer or JSON file, a link out of the folder
- `safetensors_files.py`: a shard or index that is missing, truncated or inconsistent
- `complete.py`: a tensor that is missing, of another shape or dtype, stored twice, or of a norm that is not there
- `source.py`, `Source`: gains, biases or knees that are not finite or too small; a file that changed while it was read
- `destinations.py`: a destination that holds the source, or more than a checkpoint

A model that is loaded without a conversion (`from_pretrained`) is checked by `hf_qknorm/model/load_checks.py`.
"""
