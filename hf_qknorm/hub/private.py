"""What is private in the files of a push: tokens, and paths of a machine."""

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

SETTINGS = (*CONFIGS, "special_tokens_map.json", REPORT)  # JSON whose values are no words of a model
WORDS = {*TOKENIZER_FILES} - {*SETTINGS}  # vocabularies hold anything
A_PATH = "a path of this machine"
NAMES = ("_name_or_path", "name_or_path")  # where a model came from: a name on the Hub, or a place
# Keys whose values are words or prose, which may look like a path: "/a/airfield" is a label of Places365.
PROSE = re.compile(
    r"\w*_tokens?|added_tokens_decoder|stop_strings|id2label|label2id|\w*chat_template|extra_special_\w+"
)
PLACE = re.compile(r"\w*(path|file|dir|directory|folder|root)", re.IGNORECASE)  # keys whose values are paths

# Forms that are a token or a key for sure, by the prefix that its issuer gives it.
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
# What is an absolute path as a whole: of any length, as "/models", and of two names at least, as "/mnt/models".
ANY_PATH = re.compile(rf"{URL}/[^/\n][^\n]*|~/[^\n]*|(file:///)?[A-Za-z]:[\\/][^\n]*|\\\\[^\\\n]+\\[^\n]+")
LONG_PATH = re.compile(rf"{URL}/[^/\n]+/[^\n]*|{ANY_PATH.pattern.partition('|')[2]}")


def forget_places(path: Path) -> None:
    """Take out of a config, and of those nested in it, where on this machine the model came from."""
    if not path.is_file():
        return
    data = json.loads(path.read_text(encoding="utf-8"))
    kept = _without_places(data)
    if kept != data:
        path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _without_places(data: Any) -> Any:
    if isinstance(data, list):
        return [_without_places(item) for item in data]
    if not isinstance(data, dict):
        return data
    return {
        key: _without_places(value)
        for key, value in data.items()
        if key not in NAMES or hub_name(str(value)) is not None
    }


def check_private(files: Mapping[str, Path], source: Source, token: str | None) -> None:
    """Raise ValueError where a file to be sent, or the header of one with weights, holds a token or a path.

    A token is `token`, or one of the Hub or of a common service, and is not printed. A path is the home folder or the
    checkpoint's own, anywhere but in vocabularies; or any absolute path that is the whole value of a setting. The
    message names the file with the line, or with the key.
    """
    known = (os.path.expanduser("~"), os.path.abspath(source.folder), os.path.realpath(source.folder))
    places = [re.escape(place) for place in known if len(Path(place).parts) > 1]  # not "/"
    own_path = re.compile(rf"(?<![\w.~/-])({'|'.join(places)})(?![\w-])")
    hub_token = re.compile("|".join([HUB_TOKEN.pattern, *([re.escape(token)] if token else [])]))
    tokens = {"a token of the Hub": hub_token, "a token or key": OTHER_TOKEN}
    for name, text in _texts(files, source).items():
        patterns = {"a token of the Hub": hub_token} if name in WORDS else tokens | {A_PATH: own_path}
        for what, pattern in patterns.items():
            if found := pattern.search(text):
                _refuse(f"{name}, line {text.count(chr(10), 0, found.start()) + 1}", what, found)
    for name, data in _settings(files, source).items():
        for key, text, whole_path in _strings(data, name, LONG_PATH):
            for what, pattern in (tokens | {A_PATH: own_path}).items():
                if found := pattern.search(text):
                    _refuse(key, what, found)
            if found := whole_path and whole_path.fullmatch(text):
                _refuse(key, A_PATH, found)


def _refuse(where: str, what: str, found: re.Match[str]) -> None:
    shown = f" ({shorten(found.group())})" if what == A_PATH else ""
    raise ValueError(f"{where}, holds {what}{shown}: take it out, nothing was sent")


def _texts(files: Mapping[str, Path], source: Source) -> dict[str, str]:
    """What is sent as text, by file: the files, their names, and the headers of those with weights."""
    weights = source.weights
    texts = {"the files' names": "\n".join([*files, *weights.files])}
    texts |= {name: path.read_bytes().decode("utf-8", errors="replace") for name, path in files.items()}
    for name, data in weights.metadata.items():
        texts[f"{name} (metadata)"] = "\n".join(f"{key}: {value}" for key, value in data.items())
        texts[f"{name} (names of tensors)"] = "\n".join(key for key, at in weights.stored.items() if at.file == name)
    return texts


def _settings(files: Mapping[str, Path], source: Source) -> dict[str, Any]:
    """JSON whose values are settings, by file. As text it may hide a path: escapes stand for some characters."""
    there = [name for name in SETTINGS if name in files]
    settings = {name: json.loads(files[name].read_text(encoding="utf-8-sig")) for name in there}
    return settings | {f"{name} (metadata)": data for name, data in source.weights.metadata.items()}


def _strings(data: Any, where: str, path: re.Pattern[str] | None) -> Iterator[tuple[str, str, re.Pattern[str] | None]]:
    """Every key and every string in JSON: where it is, itself, and the form of a path that it may not have."""
    if isinstance(data, str):
        yield where, data, path
    elif isinstance(data, list):
        for i, item in enumerate(data):
            yield from _strings(item, f"{where}[{i}]", path)
    elif isinstance(data, dict):
        for i, (key, item) in enumerate(data.items(), start=1):
            yield f"{where}, key {i}", key, path
            inner = None if path is None or PROSE.fullmatch(key) else ANY_PATH if PLACE.fullmatch(key) else path
            yield from _strings(item, f"{where}{'.' if ', ' in where else ', '}{key}", inner)
