"""A model before a conversion: its logits, schemes and knees tried on it, and advice."""
