"""The endpoints of the Hub in `server.py`: user, repositories, uploads, commits, downloads."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

LARGE = 4096  # bytes; larger PNG files are stored as LFS


@lru_cache(maxsize=64)
def _sha256(data: bytes) -> str:  # once: of half a gigabyte it takes longer than a client waits for an answer
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Commit:
    title: str
    files: dict[str, bytes]  # all files after the commit
    changed: tuple[str, ...] = ()

    @property
    def oid(self) -> str:
        contents = sorted((name, _sha256(data)) for name, data in self.files.items())
        return hashlib.sha1(repr((self.title, contents)).encode()).hexdigest()


@dataclass
class Repo:
    private: bool | None
    branches: dict[str, list[Commit]] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)  # LFS objects by sha256

    def commit(self, revision: str) -> Commit | None:
        by_oid = {commit.oid: commit for commits in self.branches.values() for commit in commits}
        return self.branches[revision][-1] if revision in self.branches else by_oid.get(revision)


def _token(role: str, **more: Any) -> dict[str, Any]:
    return {"type": "access_token", "accessToken": {"displayName": role, "role": role, **more}}


def _scoped(name: str) -> dict[str, Any]:
    return {"scoped": [{"entity": {"type": "user", "name": name}, "permissions": ["repo.content.read", "repo.write"]}]}


TOKENS = {
    "hf_writes": _token("write"),
    "hf_reads": _token("read"),
    "hf_mine": _token("fineGrained", fineGrained=_scoped("me")),
    "hf_elsewhere": _token("fineGrained", fineGrained=_scoped("lab")),
    "hf_revoked": _token("write"),  # described as a write token, and refused
}
ORGS = [{"name": "lab", "roleInOrg": "write"}, {"name": "readers", "roleInOrg": "read"}]


class Refused(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        self.status, self.message, self.code = status, message, code


def _user(call: Any, writes: str | None = None) -> str:
    token = call.headers.get("Authorization", "").removeprefix("Bearer ")
    if token not in TOKENS:
        raise Refused(401, "Invalid credentials in Authorization header")
    if writes is not None and (token in ("hf_reads", "hf_revoked") or writes.split("/")[0] not in ("me", "lab")):
        raise Refused(403, "You don't have the rights to write here")
    return token


def _repo(call: Any, repo_id: str) -> Repo:
    repo = call.hub.repos.get(repo_id)
    authorised = call.headers.get("Authorization", "").removeprefix("Bearer ") in TOKENS
    if repo is None or (repo.private and not authorised):
        raise Refused(404, "Repository not found", "RepoNotFound")
    return repo


def _head(call: Any, repo_id: str, revision: str) -> Commit:
    commit = _repo(call, repo_id).commit(revision)
    if commit is None:
        raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    return commit


Answer = tuple[int, dict[str, str], Any]


def _whoami(call: Any, body: bytes) -> Answer:
    return 200, {}, {"type": "user", "name": "me", "orgs": ORGS, "auth": TOKENS[_user(call)]}


def _create(call: Any, body: bytes) -> Answer:
    asked = json.loads(body)
    repo_id = f"{asked['organization'] or 'me'}/{asked['name']}"
    _user(call, repo_id)
    if repo_id in call.hub.repos:
        return 409, {}, {"error": "You already created this model repo", "url": f"{call.hub.url}/{repo_id}"}
    call.hub.created.append(asked)
    visibility = asked.get("visibility", "private" if asked.get("private") else "public")
    call.hub.create(repo_id, visibility == "private")
    return 200, {}, {"url": f"{call.hub.url}/{repo_id}"}


def _validate(call: Any, body: bytes) -> Answer:
    content = json.loads(body)["content"]
    if not content.startswith("---\n"):
        raise Refused(400, "empty metadata")
    return 200, {}, {"errors": [], "warnings": []}


def _info(call: Any, body: bytes, repo: str, revision: str | None = None) -> Answer:
    commit = _head(call, repo, revision or "main")
    files = [{"rfilename": name} for name in sorted(commit.files)]
    info = {"_id": "0", "id": repo, "modelId": repo, "sha": commit.oid, "private": bool(_repo(call, repo).private)}
    return 200, {}, info | {"siblings": files, "tags": [], "downloads": 0, "likes": 0}


def _refs(call: Any, body: bytes, repo: str) -> Answer:
    branches = _repo(call, repo).branches.items()
    named = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": commits[-1].oid} for n, commits in branches]
    return 200, {}, {"branches": named, "converts": [], "tags": [], "pullRequests": []}


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _oids(name: str, data: bytes) -> dict[str, Any]:
    if not _is_large(name, len(data)):
        return {"oid": _git_oid(data), "size": len(data)}
    sha = _sha256(data)
    return {"oid": sha, "size": len(data), "lfs": {"oid": sha, "size": len(data), "pointerSize": 134}}


def _is_large(name: str, size: int) -> bool:
    return name.endswith(".safetensors") or (size > LARGE and name.endswith(".png"))


def _tree(call: Any, body: bytes, repo: str, revision: str, folder: str | None) -> Answer:
    start = f"{folder}/" if folder else ""
    there = {name: data for name, data in _head(call, repo, revision).files.items() if name.startswith(start)}
    if not there:
        raise Refused(404, f"{folder} does not exist", "EntryNotFound")
    return 200, {}, [{"type": "file", "path": name, **_oids(name, data)} for name, data in sorted(there.items())]


def _preupload(call: Any, body: bytes, repo: str, revision: str) -> Answer:
    _user(call, repo)
    there = _head(call, repo, revision).files
    files = []
    for file in json.loads(body)["files"]:
        name = file["path"]
        answer = {"path": name, "uploadMode": "lfs" if _is_large(name, file["size"]) else "regular"}
        oid = {"oid": _oids(name, there[name])["oid"]} if name in there else {}
        files.append(answer | {"shouldIgnore": False} | oid)
    return 200, {}, {"files": files}


def _batch(call: Any, body: bytes, repo: str) -> Answer:
    _user(call, repo)
    objects = []
    for asked in json.loads(body)["objects"]:
        oid, size = asked["oid"], asked["size"]
        upload = {"href": f"{call.hub.url}/lfs/{repo}/{oid}", "header": {}}
        verify = {"href": f"{call.hub.url}/verify/{repo}"}
        actions = {} if oid in _repo(call, repo).large else {"actions": {"upload": upload, "verify": verify}}
        objects.append({"oid": oid, "size": size, "authenticated": True, **actions})
    return 200, {}, {"transfer": "basic", "objects": objects}


def _put(call: Any, body: bytes, repo: str, oid: str) -> Answer:
    if _sha256(body) != oid:
        raise Refused(400, "the content does not match its sha256")
    call.hub.repos[repo].large[oid] = body  # needs no token: the URL is secret
    return 200, {}, b""


def _verify(call: Any, body: bytes, repo: str) -> Answer:
    asked = json.loads(body)
    if len(_repo(call, repo).large.get(asked["oid"], b"")) != asked["size"]:
        raise Refused(404, "not there")
    return 200, {}, {}


def _commit(call: Any, body: bytes, repo: str, revision: str) -> Answer:
    _user(call, repo)
    files, title, changed = dict(_head(call, repo, revision).files), "", []
    for line in body.splitlines():
        key, value = (json.loads(line)[name] for name in ("key", "value"))
        changed.append(value.get("path"))
        if key == "header":
            title = value["summary"]
        elif key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            if value["oid"] not in _repo(call, repo).large:
                raise Refused(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
            files[value["path"]] = _repo(call, repo).large[value["oid"]]
        elif key == "deletedFile":
            del files[value["path"]]
        else:
            raise Refused(400, f"unknown operation {key}")
    commit = Commit(title, files, tuple(path for path in changed if path))
    _repo(call, repo).branches[revision].append(commit)
    return (
        200,
        {},
        {"success": True, "commitOid": commit.oid, "commitUrl": f"{call.hub.url}/{repo}/commit/{commit.oid}"},
    )


def _resolve(call: Any, body: bytes, repo: str, revision: str, path: str) -> Answer:
    commit = _head(call, repo, revision)
    if path not in commit.files:
        raise Refused(404, "Entry not found", "EntryNotFound")
    data = commit.files[path]
    etag = f'"{_oids(path, data)["oid"]}"'
    headers = {"ETag": etag, "X-Linked-Etag": etag, "X-Linked-Size": str(len(data)), "X-Repo-Commit": commit.oid}
    if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", call.headers.get("Range", "")):
        begin, end = int(wanted[1]), int(wanted[2] or len(data) - 1)
        return 206, headers | {"Content-Range": f"bytes {begin}-{end}/{len(data)}"}, data[begin : end + 1]
    return 200, headers, data


REPO, REV, OID = r"(?P<repo>[^/]+/[^/]+)", r"(?P<revision>.+)", "(?P<oid>[0-9a-f]{64})"
ROUTES: dict[str, Any] = {
    "GET /api/whoami-v2": _whoami,
    "POST /api/repos/create": _create,
    "POST /api/validate-yaml": _validate,
    f"GET /api/models/{REPO}": _info,
    f"GET /api/models/{REPO}/revision/{REV}": _info,
    f"GET /api/models/{REPO}/refs": _refs,
    f"GET /api/models/{REPO}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?": _tree,
    f"POST /api/models/{REPO}/preupload/{REV}": _preupload,
    f"POST /api/models/{REPO}/commit/{REV}": _commit,
    f"POST /{REPO}.git/info/lfs/objects/batch": _batch,
    f"PUT /lfs/{REPO}/{OID}": _put,
    f"POST /verify/{REPO}": _verify,
    f"(GET|HEAD) /{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)": _resolve,
}
