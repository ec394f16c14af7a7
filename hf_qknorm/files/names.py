"""The names of a checkpoint's files."""

from __future__ import annotations

import re
from pathlib import Path

from hf_qknorm.files.atomic_io import is_leftover
from hf_qknorm.files.untrusted import read_json

CONFIG = "config.json"
CONFIGS = (
    CONFIG, "generation_config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt",
    "special_tokens_map.json", "added_tokens.json", "spiece.model", "tekken.json", "sentencepiece.model",
    "sentencepiece.bpe.model", "emoji.json", "normalizer.json", "word_shape.json", "word_pronunciation.json",
)  # fmt: skip
TEMPLATES = ("chat_template.jinja", "chat_template.json")
FOLDERS = ("additional_chat_templates",)
LICENCE = re.compile(r"(licen[cs]e|notice|copying|use_policy)([._-][\w.-]+)?", re.IGNORECASE)
REPORT = "qk_norm_report.json"  # of a calibration, saved beside the weights
CARD = "README.md"
KEPT_CARD = "README.original.md"  # the card that a generated card replaced
PLOTS = LOSS_PLOT, LOGITS_PLOT = "qk_norm_loss.png", "qk_norm_logits.png"
CODE_FILE = "modeling_qknorm.py"
_NAMES = {
    SINGLE, INDEX, REPORT, CARD, KEPT_CARD, CODE_FILE,
    *CONFIGS, *TOKENIZER_FILES, *TEMPLATES, *PLOTS,
}  # fmt: skip


def unknown_files(folder: Path) -> list[str]:
    """Return the names in a folder that are not files of a checkpoint; names of folders end in "/"."""
    indexed = _indexed(folder)
    found: list[str] = []
    for item in sorted(folder.iterdir()):
        if item.is_symlink() or not item.is_dir():
            if item.name not in _NAMES | indexed and not (WEIGHTS.fullmatch(item.name) or LICENCE.fullmatch(item.name)):
                found.append(item.name)
        elif item.name in FOLDERS:
            found += [f"{item.name}/{inner.name}" for inner in sorted(item.iterdir()) if inner.suffix != ".jinja"]
        elif not is_leftover(item):
            found.append(f"{item.name}/")
    return found


def _indexed(folder: Path) -> set[str]:
    """Return the safetensors files that the folder's index names; none if it can't be read."""
    try:
        index = read_json(folder / INDEX)
        return {name for name in index["weight_map"].values() if name.endswith(".safetensors")}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()
