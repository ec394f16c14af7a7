"""Settings in config.json that make transformers' own classes refuse a patched checkpoint, with or without hf_qknorm.

A plain Llama would load the weights and lose the scheme. Transformers refuses a model whose config asks for an unknown
implementation of attention or of experts. Both settings are used, because `from_pretrained` callers often override the
first.
"""

from __future__ import annotations

from typing import Any, Final

NOTICE: Final = "qk_norm: load it after `import hf_qknorm`, or with trust_remote_code=True, by an Auto class"
NOTICES: Final = {"attn_implementation": NOTICE, "experts_implementation": NOTICE}


def is_notice(key: str, value: Any) -> bool:
    """Whether a setting is such a notice. The text after the colon may differ between versions."""
    return key in NOTICES and isinstance(value, str) and value.startswith("qk_norm:")
