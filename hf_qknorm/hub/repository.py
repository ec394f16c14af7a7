"""Check the repository that a push goes to, before anything is sent; repeat requests, and make errors readable."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from huggingface_hub import HfApi, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from hf_qknorm.checkpoint.copied_files import WEIGHT_SUFFIXES
from hf_qknorm.checkpoint.source import HTTPError
from hf_qknorm.families.class_names import TYPE_PREFIX
from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.names import CONFIG
from hf_qknorm.files.untrusted import read_json

T = TypeVar("T")
WAITS = (1, 2)  # seconds before the second and the third attempt
TRANSIENT = (408, 429, 500, 502, 503, 504)
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")  # with the model type, they identify a model


def check_repository(
    api: HfApi, repo_id: str, config: Any, *, private: bool | None = None, revision: str | None = None
) -> tuple[str, bool]:
    """Check that a model with `config` (patched or not) can be pushed to `repo_id`. Changes nothing on the Hub.

    Returns the repository's name, with the user as owner where it has none, and whether it exists.

    Raises PermissionError for a missing or unknown token and for one without write access; ValueError for a repository
    that holds another model, differs from `private` or lacks the branch; ConnectionError for no connection.
    """
    if is_offline_mode():
        raise ConnectionError("HF_HUB_OFFLINE is set, which forbids a push: unset it")
    if api.token is None:
        raise PermissionError(
            "no token for the Hub: run `hf auth login`, set HF_TOKEN, or pass token=. Create a token with write access "
            "at https://huggingface.co/settings/tokens"
        )
    with readable_hub_errors(repo_id):
        user = retry_transient(api.whoami)
        if "/" not in repo_id:
            repo_id = f"{user['name']}/{repo_id}"
        _check_write_access(user, repo_id)
        try:
            if revision is not None:
                _check_branch(api, repo_id, revision)
            info = retry_transient(lambda: api.model_info(repo_id, revision=revision))
        except RepositoryNotFoundError:
            if revision not in (None, "main"):
                raise ValueError(
                    f"{repo_id} does not exist, so it has no branch {shorten(revision)}: omit revision"
                ) from None
            return repo_id, False
        if private is not None and private != info.private:
            found, expected = ("private", "public") if info.private else ("public", "private")
            raise ValueError(
                f"{repo_id} is {found}, which differs from private={private}: make it {expected} in its settings, or "
                "omit private"
            )
        _check_same_model(api, repo_id, info, config)
    return repo_id, True


def retry_transient(request: Callable[[], T]) -> T:
    """Return what `request` returns; repeat it after a transient error of the Hub or a broken connection."""
    for wait in WAITS:
        try:
            return request()
        except HTTPError as error:
            if isinstance(error, HfHubHTTPError) and error.response.status_code not in TRANSIENT:
                raise
        time.sleep(wait)
    return request()


@contextmanager
def readable_hub_errors(repo_id: str) -> Iterator[None]:
    """Replace the Hub client's errors by one line each, with the remedy."""
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401 and not isinstance(error, RepositoryNotFoundError):
            raise PermissionError(
                "the Hub does not know this token, which is mistyped or expired: run `hf auth login`, set HF_TOKEN, or "
                "pass token="
            ) from error
        if status in (401, 403):
            raise PermissionError(
                f"{repo_id}: the Hub denied access ({summarize_error(error)}): use a token with write access, see "
                "https://huggingface.co/settings/tokens"
            ) from error
        advice = "try again later" if status in TRANSIENT else "nothing was committed"
        raise OSError(f"{repo_id}: the Hub answered {summarize_error(error)}: {advice}") from error
    except HTTPError as error:
        raise ConnectionError(
            f"{repo_id}: no connection to the Hub ({summarize_error(error)}). Check the network and HF_ENDPOINT, and "
            "try again"
        ) from error


def summarize_error(error: BaseException) -> str:
    """Return one line for an error: the client's own messages are paragraphs."""
    if isinstance(error, HfHubHTTPError):
        return f"{error.response.status_code} {error.server_message or error.response.reason_phrase}"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _check_write_access(user: dict[str, Any], repo_id: str) -> None:
    """Raise PermissionError where the token's description excludes a push; the Hub itself refuses the rest."""
    owner = repo_id.partition("/")[0]
    roles = {org["name"]: org.get("roleInOrg") for org in user.get("orgs", [])}
    if owner != user["name"] and roles.get(owner, "read") == "read":
        owners = ", ".join([user["name"], *sorted(name for name, role in roles.items() if role != "read")])
        raise PermissionError(f"{repo_id}: {user['name']} has no write access to {owner}, only to {owners}")
    token = user.get("auth", {}).get("accessToken", {})
    can_write = token.get("role") != "read"
    if "fineGrained" in token:
        scopes = token["fineGrained"].get("scoped", [])
        writable = {scope["entity"].get("name") for scope in scopes if "repo.write" in scope["permissions"]}
        can_write = bool(writable & {owner, repo_id})
    if not can_write:
        raise PermissionError(
            f"{repo_id}: the token {shorten(token.get('displayName', ''))} has no write access to it: create one that "
            "has at https://huggingface.co/settings/tokens"
        )


def _check_branch(api: HfApi, repo_id: str, revision: str) -> None:
    refs = retry_transient(lambda: api.list_repo_refs(repo_id, include_pull_requests=True))
    names = [branch.name for branch in refs.branches]
    if revision not in [*names, *(request.ref for request in refs.pull_requests or [])]:
        raise ValueError(
            f"{repo_id} has no branch {shorten(revision)}, only {', '.join(names)}: create it "
            f"(`hf repos branch create {repo_id} {revision}`), or omit revision"
        )


def _check_same_model(api: HfApi, repo_id: str, info: Any, config: Any) -> None:
    """Raise ValueError unless the repository has no model, or one with the type and the sizes of `config`."""
    files = [file.rfilename for file in info.siblings or []]
    if CONFIG in files:
        with TemporaryDirectory(prefix="hf-qknorm-") as folder:
            download = partial(api.hf_hub_download, repo_id, CONFIG, revision=info.sha, local_dir=folder)
            stored = read_json(Path(retry_transient(download)))
        expected = {"model_type": TYPE_PREFIX + config.model_type.removeprefix(TYPE_PREFIX)}
        expected |= {config.attribute_map.get(size, size): getattr(config, size) for size in SIZES}
        other = [
            f"{key} {shorten(stored.get(key))}, expected {x}" for key, x in expected.items() if stored.get(key) != x
        ]
    else:
        other = [file for file in files if Path(file).suffix in WEIGHT_SUFFIXES]
    if other:
        raise ValueError(
            f"{repo_id} holds another model ({other[0]}): use another name, or delete that repository "
            f"(`hf repos delete {repo_id}`)"
        )
