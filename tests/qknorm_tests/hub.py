"""The Hub in memory, behind the methods of `HfApi` that send requests."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationDelete, RepoUrl

METHODS = ("create_repo", "model_info", "hf_hub_download", "create_commit")


@dataclass(frozen=True)
class Commit:
    title: str
    files: dict[str, bytes]  # all files after the commit
    changed: set[str]


class Hub:
    """Commits of repositories by name and branch. `failures` has the exceptions of methods that fail."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.repos: dict[str, dict[str, list[Commit]]] = {}
        self.private: dict[str, bool] = {}
        self.failures: dict[str, Exception] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def create(self, repo_id: str, private: bool = False, **files: bytes) -> None:
        """Create a repository, with files but for an empty dict."""
        self.repos[repo_id] = {"main": [Commit("First", files, {*files})] if files else []}
        self.private[repo_id] = private

    def files(self, repo_id: str, revision: str | None = None) -> dict[str, bytes]:
        commits = self.repos[repo_id][revision or "main"]
        return commits[-1].files if commits else {}

    def save(self, repo_id: str, folder: Path) -> Path:
        """Write the files of a repository into a folder, as a download does."""
        for name, data in self.files(repo_id).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Answer a call of `HfApi`, or fail."""
        self.calls.append((method, options))
        if method in self.failures:
            raise self.failures[method]
        return getattr(self, f"_{method}")(*arguments, **options)

    def _create_repo(self, repo_id: str, *, private: bool | None = None, **_: Any) -> RepoUrl:
        name = repo_id if "/" in repo_id else f"me/{repo_id}"
        if name not in self.repos:
            self.create(name, bool(private))
        return RepoUrl(f"https://huggingface.co/{name}")

    def _model_info(self, repo_id: str, *, revision: str | None = None) -> Any:
        siblings = [SimpleNamespace(rfilename=name) for name in self.files(repo_id, revision)]
        return SimpleNamespace(private=self.private[repo_id], siblings=siblings)

    def _hf_hub_download(self, repo_id: str, filename: str, *, revision: str | None = None) -> str:
        self.cache.write_bytes(self.files(repo_id, revision)[filename])
        return str(self.cache)

    def _create_commit(
        self, repo_id: str, operations: Any, *, commit_message: str, revision: str | None = None, **_: Any
    ) -> CommitInfo:
        files, changed = dict(self.files(repo_id, revision)), set()
        for operation in operations:
            changed.add(operation.path_in_repo)
            if isinstance(operation, CommitOperationDelete):
                del files[operation.path_in_repo]
            else:
                with operation.as_file() as file:
                    files[operation.path_in_repo] = file.read()
        commits = self.repos[repo_id][revision or "main"]
        commits.append(Commit(commit_message, files, changed))
        url = f"https://huggingface.co/{repo_id}/commit/{len(commits)}"
        return CommitInfo(commit_url=url, commit_message=commit_message, commit_description="", oid="0")
