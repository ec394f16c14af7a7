"""`push_to_hub`: a patched checkpoint to the Hub, with everything that others need to run it, in one commit."""

from __future__ import annotations

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
from hf_qknorm.files.hub_names import check_repo_id, hub_token, is_path
from hf_qknorm.files.names import CARD, FOLDERS, INDEX, REPORT, TEMPLATES, TOKENIZER_FILES, WEIGHTS
from hf_qknorm.files.paths import user_path
from hf_qknorm.hub.repository import Repository, check_repository, patiently, said, told
from hf_qknorm.hub.upload_files import companions, open_checkpoint, packed
from hf_qknorm.model.derived import QKNormModel

LIBRARY = "hf_qknorm"  # as it tells the Hub
PLOT = re.compile(r"qk_norm_\w+\.png")  # of any version


def push_to_hub(
    checkpoint: str | os.PathLike[str] | PreTrainedModel,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
) -> str:
    """Push a patched checkpoint (a folder, or a model in memory) to the Hub in one commit; returns the commit's URL.

    Sent: weights, config, stand-alone code, tokenizer, templates, licence, card, calibration report and plots, and
    nothing else from the folder, which is only read. The tokenizer, templates, licence and card of a model in memory
    are those of `model.name_or_path`, a folder or a Hub name; set that to "" to send none. The repository is made if it
    is not there: `private` None leaves that to the account's default. `revision` is a branch that is there (default:
    the main one). Weights, report and plots of an earlier push that are not in this one are deleted by the same
    commit. A card of ours in the folder keeps its words; any other is where the new one takes its licence from.

    A push that broke off is resumed by pushing again: what has arrived is not sent twice, and nothing is committed
    until all is there. Requests that the Hub can't answer for the moment are repeated a few times.

    Raises, before anything is made or changed on the Hub: PermissionError for a token that is missing, unknown, or may
    not write there; ValueError for a name or a token that can't be one, for a checkpoint that is not whole, not
    patched, links out of its folder or holds a token or a path of a machine, and for a repository that holds another
    model, lacks `revision`, or is not as `private` asks; FileNotFoundError for no such folder; ConnectionError when
    offline. OSError if the upload breaks.
    """
    token = check_target(repo_id, token)
    api = HfApi(token=token, library_name=LIBRARY)
    with _folder(checkpoint, token) as folder, open_checkpoint(folder) as source:
        repository = check_repository(api, repo_id, source.config, private=private, revision=revision)
        with packed(source, repository.repo_id, token) as files:
            message = commit_message or f"Upload {source.config.architectures[0]} ({source.config.scheme})"
            return _upload(api, repository, source, files, private=private, message=message)


def check_push(source: str | os.PathLike[str], repo_id: str, *, private: bool | None = None) -> None:
    """Check that what `source` (a folder or a Hub name) will be converted to can be pushed to `repo_id`.

    Raises what `push_to_hub` raises for the token and the repository; changes nothing.
    """
    api = HfApi(token=check_target(repo_id), library_name=LIBRARY)
    config = AutoConfig.from_pretrained(os.path.expanduser(source), trust_remote_code=False)
    check_repository(api, repo_id, config, private=private)


def check_target(repo_id: str, token: str | None = None) -> str | None:
    """Check the form of a repository's name and of the token, without a request; returns the token, if there is one.

    Raises ValueError for a name that is none on the Hub, and for a token with a character that no token has.
    """
    check_repo_id(repo_id, "the repository")
    return hub_token(token)


@contextmanager
def _folder(checkpoint: Any, token: str | None) -> Iterator[Path]:
    """The folder of a checkpoint; a model in memory is saved to a temporary one."""
    if isinstance(checkpoint, (str, os.PathLike)):
        yield user_path(checkpoint, "the checkpoint")
        return
    if not isinstance(checkpoint, QKNormModel):
        raise ValueError(
            f"a {type(checkpoint).__name__} can't be pushed: give a model that patch_model patched (an adapter merged "
            "into it), or the folder that it was saved to"
        )
    with TemporaryDirectory(prefix="hf-qknorm-") as temporary:
        checkpoint.save_pretrained(temporary)
        origin = _origin(checkpoint, token)
        if origin is not None:
            for name in companions(origin):
                if not Path(temporary, name).exists() and name.name not in (INDEX, REPORT):
                    copy_file(origin, name, Path(temporary))
        yield Path(temporary)


def _origin(model: Any, token: str | None) -> Path | None:
    """The folder that a model was loaded from, or of what the Hub holds beside the weights; None without a name."""
    name = model.name_or_path
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    if is_path(name):
        raise FileNotFoundError(
            f"model.name_or_path is {name!r}, where its tokenizer should be, and that is no folder: set it to "
            '"" to push without a tokenizer'
        )
    wanted = [*TOKENIZER_FILES, *TEMPLATES, *(f"{folder}/*" for folder in FOLDERS), CARD, "LICEN*", "NOTICE*"]
    with told(name):
        commit = getattr(model.config, "_commit_hash", None)
        return Path(snapshot_download(name, revision=commit, allow_patterns=wanted, token=token))


def _upload(
    api: HfApi, repository: Repository, source: Source, files: dict[str, Path], *, private: bool | None, message: str
) -> str:
    def commit() -> Any:
        """Idempotent: where an answer was lost, the next try finds everything there, and commits nothing."""
        added = [CommitOperationAdd(name, path) for name, path in files.items()]
        api.preupload_lfs_files(repository.repo_id, added, revision=repository.revision)
        source.check_unchanged()
        there = api.model_info(repository.repo_id, revision=repository.revision).siblings or []
        stale = [file.rfilename for file in there if _is_ours(file.rfilename) and file.rfilename not in files]
        return api.create_commit(
            repository.repo_id,
            [*added, *(CommitOperationDelete(name) for name in stale)],
            commit_message=message,
            revision=repository.revision,
        )

    with told(repository.repo_id):
        if not repository.there:
            patiently(lambda: api.create_repo(repository.repo_id, private=private, exist_ok=True))
        try:
            return str(patiently(commit).commit_url)
        except RuntimeError as error:  # from the threads that upload, or from hf_xet
            cause = said(error.__cause__ or error)
            raise OSError(
                f"{repository.repo_id}: the upload broke off ({cause}). Nothing was committed. Push again: what has "
                "arrived is not sent twice"
            ) from error


def _is_ours(name: str) -> bool:
    """Whether a file in the repository is weights, a report or a plot, which would belie those of another push."""
    return name in (INDEX, REPORT) or bool(WEIGHTS.fullmatch(name) or PLOT.fullmatch(name))
