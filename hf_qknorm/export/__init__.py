"""Export of patched checkpoints to transformers' own models: `native` drives it, `targets` lists what is possible."""
