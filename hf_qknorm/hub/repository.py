"""Where a push goes: the repository on the Hub, looked at before anything is sent."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from huggingface_hub import HfApi, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from hf_qknorm.checkpoint.copied_files import WEIGHT_SUFFIXES
from hf_qknorm.checkpoint.source import HTTPError
from hf_qknorm.families.class_names import TYPE_PREFIX

T = TypeVar("T")
WAITS = (1, 2)  # seconds before the second and the third try
TRANSIENT = (408, 429, 500, 502, 503, 504)
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")  # what makes two models of a type different ones


@dataclass(frozen=True)
class Repository:
    """A repository that may be pushed to: its full name, the branch, and whether it is there already."""

    repo_id: str
    revision: str | None  # None: the main branch
    there: bool


def check_repository(
    api: HfApi, repo_id: str, config: Any, *, private: bool | None = None, revision: str | None = None
) -> Repository:
    """Check that a model of `config` (patched, or as it was before) can be pushed to `repo_id`; changes nothing.

    A name without an owner is taken to be the user's own.

    Raises PermissionError for no token, one the Hub does not know, or one that may not write there; ValueError for a
    repository that holds another model, is public where `private` was asked for (or the other way round), or lacks the
    branch; ConnectionError when offline or when the Hub can't be reached.
    """
    if is_offline_mode():
        raise ConnectionError("HF_HUB_OFFLINE is set, so that nothing can be pushed: unset it")
    with told(repo_id):
        user = _user(api)
        if "/" not in repo_id:
            repo_id = f"{user['name']}/{repo_id}"
        _check_rights(user, repo_id)
        try:
            info = patiently(lambda: api.model_info(repo_id))
        except RepositoryNotFoundError:
            if revision not in (None, "main"):
                raise ValueError(
                    f"{repo_id} is not there yet, so that it has no branch {revision!r}: leave the revision out"
                ) from None
            return Repository(repo_id, None, there=False)
        if private is not None and private != info.private:
            is_, asked = ("private", "public") if info.private else ("public", "private")
            raise ValueError(
                f"{repo_id} is there and {is_}, and private={private} was asked for: make it {asked} in its settings "
                "first, or leave private out"
            )
        _check_branch(api, repo_id, revision)
        _check_not_taken(api, repo_id, revision, config)
    return Repository(repo_id, revision, there=True)


def patiently(call: Callable[[], T]) -> T:
    """Call; where the Hub is busy or the connection breaks, wait and call again, a few times."""
    for wait in WAITS:
        try:
            return call()
        except HTTPError as error:
            if isinstance(error, HfHubHTTPError) and error.response.status_code not in TRANSIENT:
                raise
        time.sleep(wait)
    return call()


@contextmanager
def told(repo_id: str) -> Iterator[None]:
    """Turn what the Hub's client raises into one line that says what to do."""
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise PermissionError(
                f"{repo_id}: the Hub refused ({said(error)}). The token must be one that may write there: see "
                "https://huggingface.co/settings/tokens"
            ) from error
        advice = "try again later" if status in TRANSIENT else "nothing was committed"
        raise OSError(f"{repo_id}: the Hub answered {said(error)}: {advice}") from error
    except HTTPError as error:
        raise ConnectionError(
            f"{repo_id}: no connection to the Hub ({said(error)}). Check the network, and HF_ENDPOINT, and try again"
        ) from error


def said(error: BaseException) -> str:
    """What went wrong, in a few words: the client's own are a paragraph."""
    if isinstance(error, HfHubHTTPError):
        return f"{error.response.status_code} {error.server_message or error.response.reason_phrase}"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _user(api: HfApi) -> dict[str, Any]:
    if api.token is None:
        raise PermissionError(
            "no token for the Hub: run `hf auth login`, set HF_TOKEN, or pass token=. One that may write is made at "
            "https://huggingface.co/settings/tokens"
        )
    try:
        return patiently(api.whoami)
    except HfHubHTTPError as error:
        if error.response.status_code != 401:
            raise
        raise PermissionError(
            "the Hub does not know this token: it was mistyped, or has expired. Run `hf auth login`, set HF_TOKEN, or "
            "pass token="
        ) from error


def _check_rights(user: dict[str, Any], repo_id: str) -> None:
    """Raise PermissionError for what the token says of itself; what it does not say, the Hub will."""
    owner = repo_id.partition("/")[0]
    roles = {org["name"]: org.get("roleInOrg") for org in user.get("orgs", [])}
    if owner != user["name"] and roles.get(owner, "read") == "read":
        may = ", ".join([user["name"], *sorted(name for name, role in roles.items() if role != "read")])
        raise PermissionError(f"{repo_id}: {user['name']} may not write to {owner}, but to {may}: give such a name")
    token = user.get("auth", {}).get("accessToken", {})
    able = token.get("role") != "read"
    if "fineGrained" in token:
        scopes = token["fineGrained"].get("scoped", [])
        writable = {scope["entity"].get("name") for scope in scopes if "repo.write" in scope["permissions"]}
        able = bool(writable & {owner, repo_id})
    if not able:
        raise PermissionError(
            f"{repo_id}: the token {token.get('displayName', '')!r} may not write there: make one that may at "
            "https://huggingface.co/settings/tokens"
        )


def _check_branch(api: HfApi, repo_id: str, revision: str | None) -> None:
    if revision is None:
        return
    refs = patiently(lambda: api.list_repo_refs(repo_id, include_pull_requests=True))
    names = [branch.name for branch in refs.branches]
    if revision not in [*names, *(request.ref for request in refs.pull_requests or [])]:
        raise ValueError(
            f"{repo_id} has no branch {revision!r}, only {', '.join(names)}: make it first "
            f"(`hf repos branch create {repo_id} {revision}`), or leave the revision out"
        )


def _check_not_taken(api: HfApi, repo_id: str, revision: str | None, config: Any) -> None:
    """Raise ValueError unless the repository is without a model, or holds this one: of its type and size."""
    info = patiently(lambda: api.model_info(repo_id, revision=revision))
    files = [file.rfilename for file in info.siblings or []]
    if "config.json" in files:
        with TemporaryDirectory(prefix="hf-qknorm-") as folder:
            path = patiently(lambda: api.hf_hub_download(repo_id, "config.json", revision=info.sha, local_dir=folder))
            held = json.loads(Path(path).read_text(encoding="utf-8"))
        names = ["model_type", *(config.attribute_map.get(size, size) for size in SIZES)]
        ours = {name: getattr(config, name) for name in names}
        ours["model_type"] = TYPE_PREFIX + config.model_type.removeprefix(TYPE_PREFIX)
        other = [f"{name} {held.get(name)}, not {ours[name]}" for name in names if held.get(name) != ours[name]]
    else:
        other = [file for file in files if Path(file).suffix in WEIGHT_SUFFIXES]
    if other:
        raise ValueError(
            f"{repo_id} is taken: it holds another model ({other[0]}). Give another name; to replace that model, "
            f"delete it first (`hf repos delete {repo_id}`)"
        )
