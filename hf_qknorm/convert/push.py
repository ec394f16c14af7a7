"""`push_to_hub`: upload a patched checkpoint to the Hub, with its code and its card, in one commit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError
from transformers import PreTrainedModel

from hf_qknorm.checkpoint import HTTPError, keep_tokenizer_class, open_source
from hf_qknorm.convert.card import PLACEHOLDER, is_generated_card, reads_text, write_card
from hf_qknorm.families.class_names import TYPE_PREFIX
from hf_qknorm.files.atomic_io import replace_text
from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.log import logger
from hf_qknorm.files.names import CARD, CONFIG, KEPT_CARD, WEIGHTS, has_tokenizer, model_files
from hf_qknorm.files.paths import check_repo_id, user_path
from hf_qknorm.files.untrusted import read_json
from hf_qknorm.model.derived import QKNormModel
from hf_qknorm.standalone.generate import add_standalone

REPLACED: Final = re.compile(rf"{WEIGHTS.pattern}|qk_norm_.*")  # of an earlier push
SCHEME: Final = re.compile(r"In hf_qknorm the scheme is `(Scheme\(.*\))`")  # in a card
SIZES: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads")  # with the model type, they identify a model


def push_to_hub(
    checkpoint: str | os.PathLike[str] | PreTrainedModel,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    dry_run: bool = False,
) -> str | None:
    """Push a patched checkpoint to the Hub in one commit, by huggingface_hub's `create_commit`; return its URL.

    `checkpoint` is a folder, which is not changed, or a patched model in memory, whose tokenizer its own `push_to_hub`
    pushes. The commit has weights, configs, stand-alone code, tokenizer, processor, chat templates, licence, model
    card, calibration report and plots; other files of the folder are not uploaded. A card by hf_qknorm is uploaded
    with your edits; of any other card the new one keeps licence, languages, datasets and base model. With `dry_run` the
    files are printed, with their sizes in bytes, and nothing is sent.

    A missing repository is created: `private=None` leaves its visibility to the account's default. `revision` is an
    existing branch, by default the main one. The commit deletes weights, report and plots of earlier pushes. If an
    upload fails, nothing is committed; a second push sends only the files that have not arrived.

    Raises ValueError for an invalid name or token, for a checkpoint that is incomplete, not patched or linked to files
    outside its folder, and for a repository that holds another model or differs from `private`; FileNotFoundError for a
    missing folder; PermissionError for a missing or unknown token and for one without write access; ConnectionError for
    no connection; OSError if an upload fails.

    A push needs a network and a token:

    >>> qk.push_to_hub("llama-qknorm", "me/llama-qknorm")  # doctest: +SKIP
    'https://huggingface.co/me/llama-qknorm/commit/...'
    >>> qk.push_to_hub("llama", "not a name")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: the repository is 'not a name', expected ...
    """
    check_repo_id(repo_id, "the repository")
    with TemporaryDirectory(prefix="hf-qknorm-") as temporary:
        staged = Path(temporary, "staged")
        config = _stage(checkpoint, repo_id, Path(temporary))
        if reads_text(config) and not has_tokenizer(staged):
            logger.warning("%s gets no tokenizer: tokenizer.push_to_hub(%r) adds one", repo_id, repo_id)
        files = {path.relative_to(staged).as_posix(): path for path in sorted(staged.rglob("*")) if path.is_file()}
        if dry_run:
            for name, path in files.items():
                print(f"{path.stat().st_size:>16,}  {name}")  # noqa: T201
            return None
        api = HfApi(token=token, library_name="hf_qknorm")
        message = commit_message or f"Upload {config.architectures[0]} ({config.scheme})"
        with readable_hub_errors(repo_id):
            repo = api.create_repo(repo_id, private=private, exist_ok=True)
            there = _check_repository(api, repo.repo_id, config, private, revision)
            changes: list[Any] = [CommitOperationAdd(name, path) for name, path in files.items()]
            changes += [CommitOperationDelete(x) for x in there if REPLACED.fullmatch(x) and x not in files]
            # In one commit, where `upload_folder` may make several.
            return str(api.create_commit(repo.repo_id, changes, commit_message=message, revision=revision).commit_url)


@contextmanager
def readable_hub_errors(repo_id: str) -> Iterator[None]:
    """Replace the errors of the Hub's client, whose messages are paragraphs, by one line each, with the remedy."""
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        answer = f"{status} {error.server_message or error.response.reason_phrase}"
        if status in (401, 403):
            raise PermissionError(
                f"{repo_id}: the Hub denied access ({answer}): log in by `hf auth login`, set HF_TOKEN or pass token=, "
                "with a token that has write access (https://huggingface.co/settings/tokens)"
            ) from error
        raise OSError(f"{repo_id}: the Hub answered {answer}. {AGAIN}") from error
    except HTTPError as error:
        raise ConnectionError(f"{repo_id}: no connection to the Hub ({_line(error)}). {AGAIN}") from error
    except RuntimeError as error:  # from the threads that upload, or from hf_xet
        raise OSError(f"{repo_id}: the upload failed ({_line(error.__cause__ or error)}). {AGAIN}") from error


AGAIN: Final = (
    "The same command may be run again: files that have arrived are not sent twice, and if the commit was made and its "
    "answer lost, nothing is committed again"
)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _stage(checkpoint: Any, repo_id: str, temporary: Path) -> Any:
    """Make the folder `staged` in `temporary`: links to the checkpoint's files, code and card; return the config."""
    folder, staged = _folder(checkpoint, temporary), temporary / "staged"
    config = open_source(folder).config
    if not type(config).model_type.startswith(TYPE_PREFIX):
        raise ValueError(
            f"{folder} holds a plain {config.model_type}: convert it first (hf-qknorm convert), or patch the model and "
            "save it. `hf upload` pushes plain models, as exports are"
        )
    for name in model_files(folder):
        if name.name != KEPT_CARD:
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            (staged / name).symlink_to(os.path.realpath(folder / name))
    keep_tokenizer_class(folder, staged)
    add_standalone(staged)
    _add_card(staged, repo_id)
    return config


def _add_card(staged: Path, repo_id: str) -> None:
    """Write card and plots. A card by hf_qknorm keeps its edits, while its scheme and its results hold."""
    card = staged / CARD
    text = card.read_text(encoding="utf-8") if is_generated_card(card) else None
    write_card(staged, repo_id=repo_id)
    (staged / KEPT_CARD).unlink(missing_ok=True)  # for the user's folder only
    if text is not None and _stated(text) == _stated(card.read_text(encoding="utf-8")):
        replace_text(card, text.replace(PLACEHOLDER, repo_id))
    elif text is not None:
        logger.warning("%s states another scheme or other results: a new card is uploaded, without its edits", CARD)


def _stated(text: str) -> tuple[list[str], list[tuple[str | None, Any]]]:
    """Return the scheme and the results that a card states."""
    data: Any = ModelCard(text, ignore_metadata_errors=True).data
    return SCHEME.findall(text), [(result.metric_name, result.metric_value) for result in data.eval_results or []]


def _folder(checkpoint: Any, temporary: Path) -> Path:
    """Return the checkpoint's folder; a model in memory is saved to a temporary one."""
    if isinstance(checkpoint, (str, os.PathLike)):
        path = user_path(checkpoint, "the checkpoint")
        if not path.is_dir():
            raise FileNotFoundError(f"{checkpoint} is no folder: expected one with a checkpoint patched by hf_qknorm")
        return path
    if not isinstance(checkpoint, QKNormModel):
        raise ValueError(
            f"a {type(checkpoint).__name__} can't be pushed: pass a model patched by patch_model (with any adapter "
            "merged), or the folder of its checkpoint"
        )
    checkpoint.save_pretrained(temporary / "saved")
    return temporary / "saved"


def _check_repository(api: HfApi, repo_id: str, config: Any, private: bool | None, revision: str | None) -> list[str]:
    """Return a repository's files. Raises ValueError if it holds another model, or is private against `private`."""
    info = api.model_info(repo_id, revision=revision)
    if private is not None and private != info.private:
        found, expected = ("private", "public") if info.private else ("public", "private")
        raise ValueError(f"{repo_id} is {found}: make it {expected} in its settings, or leave private out")
    files = [file.rfilename for file in info.siblings or []]
    other = [name for name in files if name.endswith((".safetensors", ".bin", ".gguf"))]
    if CONFIG in files:
        stored = read_json(Path(api.hf_hub_download(repo_id, CONFIG, revision=revision)))
        stored = stored if isinstance(stored, dict) else {}
        own = {"model_type": type(config).model_type}
        own |= {config.attribute_map.get(size, size): getattr(config, size) for size in SIZES}
        other = [f"{key} {shorten(stored.get(key))}, expected {x}" for key, x in own.items() if stored.get(key) != x]
    if other:
        raise ValueError(
            f"{repo_id} holds another model ({other[0]}): use another name, or delete that repository "
            f"(`hf repos delete {repo_id}`)"
        )
    return files
