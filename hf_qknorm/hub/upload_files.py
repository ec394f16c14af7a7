"""The files of a push: files of the checkpoint that are on a fixed list, and files made for the upload.

Files that are not on the list stay out: a Trainer's state, hidden files, links to other folders. The checkpoint's
folder is not changed: generated and modified files lie in a temporary one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hf_qknorm.checkpoint.copied_files import copy_files
from hf_qknorm.checkpoint.source import Source, open_source
from hf_qknorm.families.class_names import TYPE_PREFIX
from hf_qknorm.files.names import CARD, CONFIGS, FOLDERS, INDEX, KEPT_CARD, LICENCE, REPORT, TEMPLATES, TOKENIZER_FILES
from hf_qknorm.files.paths import user_path
from hf_qknorm.hub.card import render_card, with_repository, write_card
from hf_qknorm.hub.metadata import current_report, is_generated_card, stated_results
from hf_qknorm.hub.private import check_private, remove_local_origins
from hf_qknorm.standalone.generate import add_standalone

logger = logging.getLogger("hf_qknorm")
UPLOADED = {CARD, REPORT, INDEX, *CONFIGS, *TOKENIZER_FILES, *TEMPLATES}


@contextmanager
def open_checkpoint(folder: str | os.PathLike[str]) -> Iterator[Source]:
    """Open the folder of a patched checkpoint and check that it is complete: config, weights, tokenizer, links.

    Raises FileNotFoundError for a missing folder or file; ValueError, with the file's name, for a corrupted file, a
    link to another folder, a model that is not patched, missing tensors, wrong shapes and gains that are not finite.
    """
    path = user_path(folder, "the checkpoint")
    if not path.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: expected one with a checkpoint patched by hf_qknorm")
    root = Path(os.path.realpath(path))
    for file in [*(path / name for name in side_files(path)), *path.glob("*.safetensors")]:
        if not (target := Path(os.path.realpath(file))).is_relative_to(root):
            raise ValueError(f"{file} is a link to {target}, outside the folder: replace it by the file itself")
    with open_source(path) as source:
        if not source.config.model_type.startswith(TYPE_PREFIX):
            raise ValueError(
                f"{path} holds a plain {source.config.model_type}: convert it first (hf-qknorm convert), or patch the "
                "model and save it. `hf upload` pushes plain models, as exports are"
            )
        source.check_complete()
        source.check_gains()
        yield source


def side_files(folder: Path) -> list[Path]:
    """Return the names of the files to upload besides the weights, relative to the checkpoint's folder."""
    names = [Path(x.name) for x in sorted(folder.iterdir()) if x.name in UPLOADED or LICENCE.fullmatch(x.name)]
    for name in FOLDERS:
        names += [path.relative_to(folder) for path in sorted((folder / name).glob("*.jinja"))]
    return [name for name in names if not name.name.startswith(".")]


@contextmanager
def upload_files(source: Source, repo_id: str, token: str | None) -> Iterator[dict[str, Path]]:
    """Yield all files to upload by their names in the repository, with stand-alone code and card generated.

    Raises ValueError, as `check_private` does, for a file with a token or a path of this machine.
    """
    with TemporaryDirectory(prefix="hf-qknorm-") as temporary:
        staged = Path(temporary)
        beside = (file for file in side_files(source.folder) if str(file) not in source.unread)
        copy_files(source.folder, beside, staged)
        for config in CONFIGS:
            remove_local_origins(staged / config)
        add_standalone(staged)
        if (report := current_report(source.folder, source.weights)) is not None:
            report.save(staged / REPORT)
        _add_card(staged, source.folder, repo_id)
        files = {path.relative_to(staged).as_posix(): path for path in sorted(staged.rglob("*")) if path.is_file()}
        check_private(files, source, token)
        yield files | {name: source.folder / name for name in source.weights.files}


def _add_card(staged: Path, folder: Path, repo_id: str) -> None:
    """Render card and plots. A card by hf_qknorm that was edited in `folder` stays, if scheme and results hold."""
    card = staged / CARD
    text = card.read_text(encoding="utf-8") if is_generated_card(card) else None
    stated = stated_results(card) if text is not None else {}
    write_card(staged, repo_id=repo_id)
    (staged / KEPT_CARD).unlink(missing_ok=True)  # for the user's folder only
    if not stated.items() <= stated_results(card).items():
        logger.warning("%s states another scheme or other results: a new card is uploaded, without its edits", CARD)
    elif text is not None and text != render_card(folder):
        card.write_text(with_repository(text, repo_id), encoding="utf-8")
