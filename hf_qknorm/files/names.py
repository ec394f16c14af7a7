"""The files of a checkpoint by name: those of a conversion, of a push, and those that overwriting may delete."""

from __future__ import annotations

import os
import re
from fnmatch import translate
from pathlib import Path

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt",
    "special_tokens_map.json", "added_tokens.json", "spiece.model", "tekken.json", "sentencepiece.model",
    "sentencepiece.bpe.model", "emoji.json", "normalizer.json", "word_shape.json", "word_pronunciation.json",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"  # a folder
LICENCE = re.compile(r"(licen[cs]e|notice|copying|use_policy)([._-][\w.-]+)?", re.IGNORECASE)
REPORT = "qk_norm_report.json"  # of a calibration, saved beside the weights
CARD = "README.md"
KEPT_CARD = "README.original.md"  # the card that a generated card replaced
PLOT = "qk_norm_logits.png"
CODE_FILE = "modeling_qknorm.py"
GENERATED = (CONFIG, REPORT, KEPT_CARD, CODE_FILE, PLOT)  # by this package, for one checkpoint alone

# Beside the weights: of this package, tokenizers, processors, templates and licences; no index of weights.
_PATTERNS = (
    *GENERATED, CARD, *TOKENIZER_FILES, "*_config.json", "chat_template.json", "*.jinja", "*.model", "*.spm",
    "*.tiktoken", "tokenizer*",
)  # fmt: skip
SIDE_FILE = re.compile(rf"(?!\.)({'|'.join(map(translate, _PATTERNS))}|(?i:{LICENCE.pattern}))")


def model_files(folder: Path) -> list[Path]:
    """Return the names of a checkpoint's files in its folder: weights, configs, tokenizer, templates and licence.

    Raises ValueError for a link out of the folder: a copy could publish a private file.
    """
    found = [path for path in folder.iterdir() if WEIGHTS.fullmatch(path.name) or SIDE_FILE.fullmatch(path.name)]
    paths = [path for path in sorted([*found, *(folder / TEMPLATES).glob("*.jinja")]) if path.is_file()]
    for path in paths:
        check_inside(folder, path)
    return [path.relative_to(folder) for path in paths]


def side_files(folder: Path) -> list[Path]:
    """Return `model_files` without the weights. Raises ValueError as it does."""
    return [file for file in model_files(folder) if not WEIGHTS.fullmatch(file.name)]


def other_files(folder: Path) -> list[str]:
    """Return the names in a folder that are no files of a checkpoint; names of folders end in "/"."""
    known = {*model_files(folder), Path(TEMPLATES)}
    found = {path.relative_to(folder): path for path in [*folder.iterdir(), *(folder / TEMPLATES).glob("*")]}
    return [f"{name}/" if found[name].is_dir() else str(name) for name in sorted(found.keys() - known)]


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has files of a tokenizer."""
    return any((folder / file).is_file() for file in TOKENIZER_FILES)


def check_inside(folder: Path, path: Path) -> None:
    """Raise ValueError for a file outside its folder, and outside the blobs of a snapshot in the Hub's cache."""
    real, roots = Path(os.path.realpath(path)), [Path(os.path.realpath(folder))]
    if folder.absolute().parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    if not any(real.is_relative_to(root) for root in roots):
        raise ValueError(f"{path} is a link to {real}, outside the folder: put the file itself there")
