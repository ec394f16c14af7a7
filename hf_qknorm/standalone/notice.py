"""What config.json says so that transformers' own classes refuse a patched checkpoint, also without this package.

They read which implementation of attention and of experts a model asks for, and refuse one that they don't know.
Otherwise a plain Llama would load the weights, and lose the scheme. There are two settings, because callers of
`from_pretrained` often name the first, which then takes the place of the one in the file.
"""

from __future__ import annotations

from typing import Any, Final

NOTICE: Final = "qk_norm: load it after `import hf_qknorm`, or with trust_remote_code=True, by an Auto class"
NOTICES: Final = {"attn_implementation": NOTICE, "experts_implementation": NOTICE}


def is_notice(key: str, value: Any) -> bool:
    """Whether a setting is such a one; a later version's text may differ behind the colon."""
    return key in NOTICES and isinstance(value, str) and value.startswith("qk_norm:")
