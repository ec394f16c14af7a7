"""What a push sends: the files of a checkpoint that are meant for others, and what is made for them on the way.

A known list goes up, never the folder: not what a Trainer leaves, nothing hidden, nothing from elsewhere. The user's
folder is read, and everything that is made or changed lies in a temporary one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hf_qknorm.checkpoint.copied_files import copy_file
from hf_qknorm.checkpoint.source import Source, open_source
from hf_qknorm.families.class_names import TYPE_PREFIX
from hf_qknorm.files.names import CARD, CONFIGS, FOLDERS, INDEX, KEPT_CARD, LICENCE, REPORT, TEMPLATES, TOKENIZER_FILES
from hf_qknorm.files.paths import user_path
from hf_qknorm.hub.card import PLACEHOLDER, has_card, write_card
from hf_qknorm.hub.private import check_private, forget_places
from hf_qknorm.standalone import add_standalone

SENT = {CARD, REPORT, INDEX, *CONFIGS, *TOKENIZER_FILES, *TEMPLATES}


@contextmanager
def open_checkpoint(folder: str | os.PathLike[str]) -> Iterator[Source]:
    """Open a folder with a patched checkpoint and check that it is whole: config, weights, tokenizer, links.

    Raises FileNotFoundError for no folder or a file that is not there; ValueError, naming the file, for one that is
    corrupted or a link to elsewhere, for a model that is not patched, for tensors that it asks for and that are missing
    or do not fit, and for gains that are not finite.
    """
    path = user_path(folder, "the checkpoint")
    if not path.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: expected one with a checkpoint that hf_qknorm patched")
    _check_links(path)
    with open_source(path) as source:
        if not source.config.model_type.startswith(TYPE_PREFIX):
            raise ValueError(
                f"{path} holds a plain {source.config.model_type}: convert it first (hf-qknorm convert), or patch the "
                "model and save it"
            )
        source.check_complete()
        source.check_gains()
        yield source


def companions(folder: Path) -> list[Path]:
    """The files of a checkpoint folder, weights aside, that are meant for others: their names in it."""
    names = [Path(item.name) for item in sorted(folder.iterdir()) if item.name in SENT or LICENCE.fullmatch(item.name)]
    for name in FOLDERS:
        names += [path.relative_to(folder) for path in sorted((folder / name).glob("*.jinja"))]
    return [name for name in names if not name.name.startswith(".")]


@contextmanager
def packed(source: Source, repo_id: str, token: str | None) -> Iterator[dict[str, Path]]:
    """Everything that goes up, by its name in the repository: stand-alone code and card are made here.

    Raises ValueError, as `check_private` does, where a file holds a token or a path of this machine.
    """
    with TemporaryDirectory(prefix="hf-qknorm-") as temporary:
        staged = Path(temporary)
        for file in companions(source.folder):
            if str(file) in source.unread:
                continue
            copy_file(source.folder, file, staged)
        for config in CONFIGS:
            forget_places(staged / config)
        add_standalone(staged)
        _add_card(staged, repo_id)
        files = {path.relative_to(staged).as_posix(): path for path in sorted(staged.rglob("*")) if path.is_file()}
        check_private(files, source, token)
        yield files | {name: source.folder / name for name in source.weights.files}


def _add_card(staged: Path, repo_id: str) -> None:
    """Render card and plots; a card of ours that is there, and may have been edited, keeps its words."""
    card = staged / CARD
    words = card.read_text(encoding="utf-8") if has_card(staged) else None
    write_card(staged, repo_id=repo_id)
    (staged / KEPT_CARD).unlink(missing_ok=True)  # it stays with the user
    if words is not None:
        card.write_text(words.replace(PLACEHOLDER, repo_id), encoding="utf-8")


def _check_links(folder: Path) -> None:
    root = Path(os.path.realpath(folder))
    for file in [*(folder / name for name in companions(folder)), *folder.glob("*.safetensors")]:
        place = Path(os.path.realpath(file))
        if not place.is_relative_to(root):
            raise ValueError(f"{file} is a link to {place}, outside the folder: put the file itself there")
