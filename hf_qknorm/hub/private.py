"""Find private data in the files of a push: tokens, and paths of this machine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_qknorm.checkpoint.source import Source
from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.hub_names import hub_name
from hf_qknorm.files.names import CONFIGS, REPORT, TOKENIZER_FILES

SETTINGS = (*CONFIGS, "special_tokens_map.json", REPORT)  # JSON files whose values are settings
VOCABULARIES = {*TOKENIZER_FILES} - {*SETTINGS}  # any string may be a token of a tokenizer
A_PATH = "a path of this machine"
ORIGINS = ("_name_or_path", "name_or_path")  # keys for the model's origin: a name on the Hub, or a path
# Keys whose values are words or prose, which may look like a path: "/a/airfield" is a label of Places365.
PROSE = re.compile(
    r"\w*_tokens?|added_tokens_decoder|stop_strings|id2label|label2id|\w*chat_template|extra_special_\w+"
)
PATH_KEY = re.compile(r"\w*(path|file|dir|directory|folder|root)", re.IGNORECASE)  # keys whose values are paths

# Forms that are always a token or a key, by their issuers' prefixes.
HUB_TOKEN = re.compile(r"hf_[A-Za-z0-9]{34,}|hf_(oauth|jwt)_[\w.~+/-]{16,}|api_org_[A-Za-z0-9]{34}")
OTHER_TOKEN = re.compile(
    r"""\b(
      gh[opsur]_[A-Za-z0-9]{36} | github_pat_\w{60} | glpat-[\w-]{20}  # GitHub, GitLab
    | (AKIA|ASIA)[A-Z0-9]{16}\b  # AWS
    | AIza[\w-]{35} | ya29\.[\w-]{30} | GOCSPX-[\w-]{28}  # Google
    | AccountKey=[A-Za-z0-9+/]{86}==  # Azure
    | sk-(ant|proj|svcacct)-[\w-]{32} | sk-[A-Za-z0-9]{20}T3BlbkFJ[A-Za-z0-9]{20}  # Anthropic, OpenAI
    | xox[abprs]-\d[\w-]{20} | npm_[A-Za-z0-9]{36} | pypi-AgE[\w-]{50}  # Slack, npm, PyPI
    ) | -----BEGIN\ ([A-Z]+\ )*PRIVATE\ KEY-----""",
    re.VERBOSE,
)
URL = r"(file://(localhost)?)?"
# Strings that are an absolute path: of any length ("/models"), and of two names at least ("/mnt/models").
ANY_PATH = re.compile(rf"{URL}/[^/\n][^\n]*|~/[^\n]*|(file:///)?[A-Za-z]:[\\/][^\n]*|\\\\[^\\\n]+\\[^\n]+")
LONG_PATH = re.compile(rf"{URL}/[^/\n]+/[^\n]*|{ANY_PATH.pattern.partition('|')[2]}")


def remove_local_origins(path: Path) -> None:
    """Remove local paths of the model's origin from a config file, nested configs included."""
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8")
    kept = json.loads(text, object_hook=_without_local_origin)
    if kept != json.loads(text):
        path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _without_local_origin(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key not in ORIGINS or hub_name(str(value)) is not None}


def check_private(files: Mapping[str, Path], source: Source, token: str | None) -> None:
    """Raise ValueError if a file to upload, or the header of a weights file, contains a token or a local path.

    A token is `token`, or one with a known form of the Hub or a common service; the message does not print it. A path
    is the home folder or the checkpoint's, anywhere but in vocabularies, or any absolute path that is the whole value
    of a setting. The message names the file with the line or the key.
    """
    own_places = (os.path.expanduser("~"), os.path.abspath(source.folder), os.path.realpath(source.folder))
    places = [re.escape(place) for place in own_places if len(Path(place).parts) > 1]  # not "/"
    own_path = re.compile(rf"(?<![\w.~/-])({'|'.join(places)})(?![\w-])")
    hub_token = re.compile("|".join([HUB_TOKEN.pattern, *([re.escape(token)] if token else [])]))
    everywhere = {"a token of the Hub": hub_token}
    patterns = everywhere | {"a token or key": OTHER_TOKEN, A_PATH: own_path}
    for name, text in _texts(files, source).items():
        for what, pattern in (everywhere if name in VOCABULARIES else patterns).items():
            if found := pattern.search(text):
                _refuse(f"{name}, line {text.count(chr(10), 0, found.start()) + 1}", what, found)
    for name, data in _settings(files, source).items():
        for key, text, path_form in _strings(data, name, LONG_PATH):
            for what, pattern in patterns.items():
                if found := pattern.search(text):
                    _refuse(key, what, found)
            if found := path_form and path_form.fullmatch(text):
                _refuse(key, A_PATH, found)


def _refuse(where: str, what: str, found: re.Match[str]) -> None:
    shown = f" ({shorten(found.group())})" if what == A_PATH else ""
    raise ValueError(f"{where}, contains {what}{shown}: remove it; nothing was uploaded")


def _texts(files: Mapping[str, Path], source: Source) -> dict[str, str]:
    """All uploaded text by its place: the files, their names, and the headers of weights files."""
    weights = source.weights
    texts = {"the files' names": "\n".join([*files, *weights.files])}
    texts |= {name: path.read_bytes().decode("utf-8", errors="replace") for name, path in files.items()}
    for name, data in weights.metadata.items():
        texts[f"{name} (metadata)"] = "\n".join(f"{key}: {value}" for key, value in data.items())
        texts[f"{name} (names of tensors)"] = "\n".join(key for key, at in weights.stored.items() if at.file == name)
    return texts


def _settings(files: Mapping[str, Path], source: Source) -> dict[str, Any]:
    """The parsed JSON of settings by its place: escapes can hide a path in the text of a file."""
    settings = {name: json.loads(files[name].read_text(encoding="utf-8-sig")) for name in SETTINGS if name in files}
    return settings | {f"{name} (metadata)": data for name, data in source.weights.metadata.items()}


def _strings(data: Any, where: str, form: re.Pattern[str] | None) -> Iterator[tuple[str, str, re.Pattern[str] | None]]:
    """Yield every key and every string in JSON: its place, itself, and the form of a path that it must not have."""
    if isinstance(data, str):
        yield where, data, form
    elif isinstance(data, list):
        for i, item in enumerate(data):
            yield from _strings(item, f"{where}[{i}]", form)
    elif isinstance(data, dict):
        for i, (key, item) in enumerate(data.items(), start=1):
            yield f"{where}, key {i}", key, form
            inner = None if form is None or PROSE.fullmatch(key) else ANY_PATH if PATH_KEY.fullmatch(key) else form
            yield from _strings(item, f"{where}{'.' if ', ' in where else ', '}{key}", inner)
