"""`push_to_hub`: upload a patched checkpoint to the Hub, with everything needed to run it, in one commit."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, snapshot_download
from transformers import AutoConfig, PreTrainedModel

from hf_qknorm.checkpoint.copied_files import copy_file
from hf_qknorm.checkpoint.source import Source
from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.hub_names import check_repo_id, hub_token, is_path
from hf_qknorm.files.names import CARD, CONFIGS, FOLDERS, INDEX, REPORT, TEMPLATES, TOKENIZER_FILES, WEIGHTS
from hf_qknorm.files.paths import user_path
from hf_qknorm.hub.card import has_tokenizer, reads_text
from hf_qknorm.hub.repository import check_repository, readable_hub_errors, retry_transient, summarize_error
from hf_qknorm.hub.upload_files import open_checkpoint, side_files, upload_files
from hf_qknorm.model.derived import QKNormModel

logger = logging.getLogger("hf_qknorm")
LIBRARY = "hf_qknorm"  # the client's name in requests
PLOT = re.compile(r"qk_norm_\w+\.png")  # of any version of the package


def push_to_hub(
    checkpoint: str | os.PathLike[str] | PreTrainedModel,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
) -> str:
    """Push a patched checkpoint to the Hub in one commit and return the commit's URL.

    `checkpoint` is a folder, which is not changed, or a patched model in memory. The commit has weights, configs,
    stand-alone code, tokenizer, image processor, chat templates, licence, model card, calibration report and plots;
    other files of the folder are not uploaded. A model in memory takes tokenizer, processor, templates, licence and
    card from its `name_or_path`, a folder or a name on the Hub; set that to "" to omit them. A card by hf_qknorm in the
    folder is uploaded with its edits; of any other card, the new one keeps licence, languages, datasets and base model.
    A report is marked as stale if the weights have changed since it was measured, and a card with its numbers, or of
    another scheme, is replaced. That is logged as a warning, as is a missing tokenizer.

    A missing repository is created: `private=None` leaves its visibility to the account's default. `revision` is an
    existing branch, by default the main one. The commit deletes weights, report and plots of earlier pushes.

    Transient errors are retried. If an upload fails, nothing is committed; a second push skips the files that have
    arrived.

    Raises, before it changes anything on the Hub: PermissionError for a missing or unknown token and for one without
    write access; ValueError for an invalid name or token, for a checkpoint that is incomplete, not patched, linked to
    files outside its folder, or contains a token or a path of this machine, and for a repository that holds another
    model, lacks `revision` or differs from `private`; FileNotFoundError for a missing folder; ConnectionError for no
    connection. Raises OSError if an upload fails.

    A push needs a network and a token:

    >>> qk.push_to_hub("llama-qknorm", "me/llama-qknorm")  # doctest: +SKIP
    'https://huggingface.co/me/llama-qknorm/commit/...'
    >>> qk.push_to_hub("llama", "not a name")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: the repository is 'not a name', expected ...
    """
    token = check_target(repo_id, token)
    api = HfApi(token=token, library_name=LIBRARY)
    with _folder(checkpoint, token) as folder, open_checkpoint(folder) as source:
        repo_id, exists = check_repository(api, repo_id, source.config, private=private, revision=revision)
        if reads_text(source.config) and not has_tokenizer(source.folder):
            logger.warning(
                "%s gets no tokenizer, since there is none beside the model: save one there "
                "(tokenizer.save_pretrained), and push again",
                repo_id,
            )
        if commit_message is None:
            commit_message = f"Upload {source.config.architectures[0]} ({source.config.scheme})"
        with upload_files(source, repo_id, token) as files, readable_hub_errors(repo_id):
            if not exists:
                retry_transient(lambda: api.create_repo(repo_id, private=private, exist_ok=True))
            return _upload(api, repo_id, source, files, commit_message=commit_message, revision=revision)


def check_push(source: str | os.PathLike[str], repo_id: str, *, private: bool | None = None) -> None:
    """Check that the conversion of `source` (a folder or a name on the Hub) can be pushed to `repo_id`.

    Raises what `push_to_hub` raises for the token and the repository. Changes nothing.
    """
    api = HfApi(token=check_target(repo_id), library_name=LIBRARY)
    config = AutoConfig.from_pretrained(os.path.expanduser(source), trust_remote_code=False)
    check_repository(api, repo_id, config, private=private)


def check_target(repo_id: str, token: str | None = None) -> str | None:
    """Check the form of a repository's name and of the token without a request; return the token, if any.

    Raises ValueError for an invalid name and for a token with an invalid character.
    """
    check_repo_id(repo_id, "the repository")
    return hub_token(token)


@contextmanager
def _folder(checkpoint: Any, token: str | None) -> Iterator[Path]:
    """The checkpoint's folder; a model in memory is saved to a temporary one."""
    if isinstance(checkpoint, (str, os.PathLike)):
        yield user_path(checkpoint, "the checkpoint")
        return
    if not isinstance(checkpoint, QKNormModel):
        raise ValueError(
            f"a {type(checkpoint).__name__} can't be pushed: pass a model patched by patch_model (with any adapter "
            "merged), or the folder of its checkpoint"
        )
    if checkpoint.config.saves_as_base:
        raise ValueError(
            f"this model's scheme changes nothing, so that it saves as a plain {checkpoint.config.base_model_type}: "
            "push it by its own method, model.push_to_hub, or patch it with another scheme"
        )
    with TemporaryDirectory(prefix="hf-qknorm-") as temporary:
        checkpoint.save_pretrained(temporary)
        if (origin := _origin(checkpoint, token)) is not None:
            for name in side_files(origin):
                if not Path(temporary, name).exists() and name.name not in (INDEX, REPORT):
                    copy_file(origin, name, Path(temporary))
        yield Path(temporary)


def _origin(model: Any, token: str | None) -> Path | None:
    """The folder that a model was loaded from, or a download of its files besides the weights; None without a name."""
    name = model.name_or_path
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    if is_path(name):
        raise FileNotFoundError(
            f"model.name_or_path is {shorten(str(name))}, expected a folder with the tokenizer: set it to "
            '"" to push without a tokenizer'
        )
    wanted = [*CONFIGS, *TOKENIZER_FILES, *TEMPLATES, *(f"{folder}/*" for folder in FOLDERS), CARD, "LICEN*", "NOTICE*"]
    with readable_hub_errors(name):
        commit = getattr(model.config, "_commit_hash", None)
        return Path(snapshot_download(name, revision=commit, allow_patterns=wanted, token=token))


def _upload(
    api: HfApi, repo_id: str, source: Source, files: dict[str, Path], *, commit_message: str, revision: str | None
) -> str:
    """Upload the files, delete stale ones, and commit; return the commit's URL."""

    def commit() -> Any:
        """Idempotent: if the answer is lost, the next attempt finds the files unchanged and commits nothing."""
        added = [CommitOperationAdd(name, path) for name, path in files.items()]
        api.preupload_lfs_files(repo_id, added, revision=revision)
        source.check_unchanged()
        stored = api.model_info(repo_id, revision=revision).siblings or []
        stale = [file.rfilename for file in stored if _is_ours(file.rfilename) and file.rfilename not in files]
        deleted = [CommitOperationDelete(name) for name in stale]
        return api.create_commit(repo_id, [*added, *deleted], commit_message=commit_message, revision=revision)

    try:
        return str(retry_transient(commit).commit_url)
    except RuntimeError as error:  # from the threads that upload, or from hf_xet
        raise OSError(
            f"{repo_id}: the upload failed ({summarize_error(error.__cause__ or error)}). Nothing was committed. Push "
            "again: files that have arrived are skipped"
        ) from error


def _is_ours(name: str) -> bool:
    """Whether a file in the repository is weights, a report or a plot, which must not mix with a new push."""
    return name in (INDEX, REPORT) or bool(WEIGHTS.fullmatch(name) or PLOT.fullmatch(name))
