"""A case under every command, and the verdict on each: the oracle of the test."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from broken.bases import twin, whole
from broken.cases import Case, break_copy
from broken.edits import read_config
from broken.workers import SCHEME, Answer, Facts, Worker, Workers

COMMANDS = ("load", "convert", "export")
STATES = (  # what a message may say of a whole checkpoint that a command is not for
    "converted already",
    "not a patched model",
    "during a blend",
    "is quantised",
    "would be lost",
    "folded the norms in front of attention",
)
RIGHT, REFUSED, SILENT, OWN = "right", "refused, named", "transformers is silent", "transformers' own error"
WRONG, UNNAMED, HANG, CRASH = "WRONG", "unnamed error", "hang", "crash"
OUTCOMES = (RIGHT, REFUSED, SILENT, OWN, WRONG, UNNAMED, HANG, CRASH)
FAULTS = (WRONG, UNNAMED, HANG, CRASH)
FILES = re.compile(r"config\.json|generation_config|\.safetensors|index\.json|tokenizer|\.bin\b|adapter_config")
LAYER = re.compile(r"\w\.\d+\.\w")  # a part of a layer, as model.layers.1.self_attn
FIELDS = re.compile(r"\b[a-z]+_[a-z_]+\b")  # a word that only a field or a tensor can be
TOLERANCE = {"torch.float32": 1e-4, "torch.float64": 1e-4}


@dataclass(frozen=True)
class Verdict:
    outcome: str
    why: str = ""


def close(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two answers have the same logits, up to rounding; NaN equals NaN."""
    if a.get("kind") != "done" or b.get("kind") != "done" or len(a["logits"]) != len(b["logits"]):
        return False
    tolerance = max(TOLERANCE.get(one["dtype"], 0.05) for one in (a, b))
    finite = [abs(x) for x in b["logits"] if math.isfinite(x)]
    size = max(finite, default=0.0)

    def same(x: float, y: float) -> bool:
        if not (math.isfinite(x) and math.isfinite(y)):
            return x == y or (math.isnan(x) and math.isnan(y))
        return abs(x - y) <= tolerance * max(size, 1e-6)

    return all(map(same, a["logits"], b["logits"]))


def named(answer: dict[str, Any], names: tuple[str, ...], fields: frozenset[str]) -> bool:
    """Whether an error names a file, the changed field or tensor, or another field of the config."""
    text = answer["text"]
    if FILES.search(text) or LAYER.search(text) or any(name and name in text for name in names):
        return True
    return bool(fields & {*FIELDS.findall(text)})


def failed(answer: dict[str, Any], names: tuple[str, ...], fields: frozenset[str]) -> Verdict:
    """Return the verdict on an answer that is not a success."""
    if answer["kind"] in ("hang", "crash"):
        return Verdict(HANG if answer["kind"] == "hang" else CRASH, answer["text"])
    said = f"{answer['type']} at {answer['place']}: {answer['text'].strip().partition(chr(10))[0][:160]}"
    if not named(answer, names, fields):
        return Verdict(UNNAMED, said)
    if not answer["one_line"]:
        return Verdict(UNNAMED, f"a traceback: {said}")
    return Verdict(REFUSED, said)


def gist(text: str) -> str:
    """Return the start of a message, without numbers, its folder, and what a derived class adds to its base's name."""
    return re.sub(r"\d+|QKNorm|qknorm_|/src|/twin", "", text)[:40]


class Trial:
    """A case, broken in a folder of its own, and the outcome of each command."""

    def __init__(self, case: Case, root: Path, facts: Facts, workers: Workers) -> None:
        self.case, self.root, self.workers, self.base = case, root, workers, case.base
        self.facts = facts[case.base.name]
        self.place = root / f"case-{case.number}"
        (self.place / "out").mkdir(parents=True)
        (self.place / "out").chmod(0o777)
        self.folder = break_copy(case, root, self.place / "src")
        self.fields = frozenset(key for key in read_config(whole(root, self.base, case.layout)) if "_" in key)

    def run(self, commands: tuple[str, ...] = COMMANDS) -> dict[str, Verdict]:
        """Return the verdict on each command."""
        try:
            return {command: getattr(self, f"judge_{command}")() for command in commands}
        finally:
            for path in (self.place, self.folder):
                path.chmod(0o700)
            shutil.rmtree(self.place)

    def ask(self, command: str, folder: Path | None = None, worker: Worker | None = None, **more: Any) -> Answer:
        if command in ("load", "reference"):
            more.setdefault("auto", self.base.auto)
        answer = (worker or self.workers.package)(
            command, folder=str(folder or self.folder), unprivileged=self.case.unprivileged, **more
        )
        for key in ("text", "place"):  # a folder's name is no file's
            answer[key] = str(answer.get(key, "")).replace(str(self.place), "").replace(str(self.root), "")
        return answer

    @cached_property
    def plain(self) -> Answer:
        """Return the outcome of transformers alone on the folder."""
        return self.ask("load", worker=self.workers.plain)

    @cached_property
    def twin_folder(self) -> Path:
        """Return the unpatched twin, broken alike; for an unpatched case, the folder itself."""
        if self.base.scheme is None:
            return self.folder
        return break_copy(self.case, self.root, self.place / "twin", twin)

    @cached_property
    def plain_twin(self) -> Answer:
        """Return the outcome of transformers alone on the twin."""
        return self.plain if self.base.scheme is None else self.ask("load", self.twin_folder, self.workers.plain)

    @cached_property
    def loaded(self) -> Answer:
        return self.ask("load")

    @cached_property
    def meant(self) -> Answer:
        """Return what the checkpoint is by its own config, where that is valid: its twin, patched as that says."""
        scheme, blend = self.base.scheme, self.base.blend
        try:
            config, before = read_config(self.folder), read_config(whole(self.root, self.base, self.case.layout))
        except (OSError, ValueError):
            return {"kind": "error"}
        said, old = config.get("qk_norm"), before["qk_norm"]
        if json.dumps(said) != json.dumps(old):
            whole_scheme = isinstance(said, str) or (isinstance(said, dict) and {*said} == {*old})
            if not whole_scheme or (blend is not None and not isinstance(said, dict)):
                return {"kind": "error"}
            scheme = said
            if blend is not None:  # what is stored is the cap in force, and at the end another
                if said["softcap"] != old["softcap"] or config.get("qk_norm_blend") != before["qk_norm_blend"]:
                    return {"kind": "error"}
                scheme = said | {"softcap": before["qk_norm_blend"]["softcap"]}
        answer = self.ask("reference", self.twin_folder, scheme=scheme, norms=str(self.folder), blend=blend)
        cap = (scheme if isinstance(scheme, dict) else {}).get("softcap") if scheme is said else old["softcap"]
        if isinstance(scheme, dict) and config.get("attn_logit_softcapping") not in (None, cap):
            return {"kind": "error"}
        return answer

    def judge_load(self) -> Verdict:
        ours = self.loaded
        if ours["kind"] != "done":
            return self.judge_failure(ours)
        if close(ours, self.facts["load"]):
            return Verdict(RIGHT)
        if close(ours, self.plain) or (self.base.scheme is None and self.plain.get("made_up")):
            return Verdict(SILENT, "as transformers loads it")
        if self.base.scheme is not None:
            if close(ours, self.meant) and not self.meant["made_up"]:
                same = close(self.plain_twin, self.facts["twin"])
                return Verdict(RIGHT if same else SILENT, "as its config says")
            if self.plain_twin.get("made_up"):
                return Verdict(SILENT, f"transformers makes up {self.plain_twin['made_up'][0]}")
        return Verdict(WRONG, f"it loads, and computes something else; {self.said_by_plain()}")

    def said_by_plain(self) -> str:
        plain = self.plain_twin
        if plain["kind"] == "done":
            return "transformers alone loads the unpatched twin"
        return f"transformers alone refuses the unpatched twin: {plain.get('type', plain['kind'])} {plain['text'][:80]}"

    def judge_failure(self, answer: Answer) -> Verdict:
        """Judge a failed load: it must fail, or fail as transformers alone does."""
        verdict = failed({**answer, "one_line": True}, self.case.names, self.fields)  # no command line is between
        if verdict.outcome == REFUSED and not self.case.harmless:
            return verdict
        for plain in (self.plain, self.plain_twin):
            alike = all(plain.get(key) == answer.get(key) for key in ("kind", "type"))
            if plain["kind"] != "done" and alike and gist(plain["text"]) == gist(answer["text"]):
                return Verdict(OWN, verdict.why)
        if self.case.harmless:
            return Verdict(WRONG, f"refused, and nothing is broken: {verdict.why}")
        return Verdict(verdict.outcome, f"{verdict.why}; {self.said_by_plain()}")

    def judge_refusal(self, answer: Answer, expected: bool) -> Verdict:
        """Judge a failed command, which must leave nothing; `expected` says whether it must fail."""
        if left := sorted(path.name for path in (self.place / "out").iterdir()):
            return Verdict(WRONG, f"it failed and left {left}: {answer['text'][:100]}")
        verdict = failed(answer, self.case.names, self.fields)
        if verdict.outcome in FAULTS and answer.get("one_line") and any(x in answer["text"] for x in STATES):
            verdict = Verdict(REFUSED, verdict.why)
        if not expected and verdict.outcome not in FAULTS:
            return Verdict(WRONG, f"refused, and nothing is broken: {verdict.why}")
        return verdict

    def judge_written(self, answer: Answer, out: str, expected: bool, worker: Worker | None = None) -> Verdict | Answer:
        """Judge what a conversion or an export wrote: a verdict, or the outcome of loading it."""
        if answer["kind"] != "done":
            return self.judge_refusal(answer, expected)
        got = self.ask("load", Path(out), worker)
        if got["kind"] != "done":
            return Verdict(WRONG, f"written, and does not load: {got.get('type')}: {got['text'][:120]}")
        return self.judge_tokens(Path(out)) or got

    def destination(self, name: str) -> str:
        for path in (self.place / "out").iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return str(self.place / "out" / name)

    def judge_convert(self) -> Verdict:
        out = self.destination("converted")
        patched = self.base.scheme is not None
        got = self.judge_written(self.ask("convert", destination=out), out, patched or not self.case.harmless)
        if isinstance(got, Verdict):
            return got
        if not patched and close(got, self.facts["convert"]):
            return Verdict(RIGHT)
        meant = self.ask("reference", scheme=SCHEME)
        if close(got, meant) and not meant["made_up"]:
            return Verdict(SILENT, "as transformers loads its source")
        made_up = f", of which transformers makes up {meant['made_up'][0]}" if meant.get("made_up") else ""
        return Verdict(WRONG, f"written, and is something else than its source patched{made_up}")

    def judge_export(self) -> Verdict:
        out = self.destination("exported")
        answer = self.ask("export", destination=out)
        expected = not (self.base.exports and self.case.harmless)
        got = self.judge_written(answer, out, expected, self.workers.plain)
        if isinstance(got, Verdict):
            return got
        if self.base.scheme is None or got["made_up"]:
            return Verdict(WRONG, "written, and its source is not patched, or a tensor is missing")
        if close(got, self.facts["load"]):
            return Verdict(RIGHT)
        loaded = self.judge_load()
        if close(got, self.loaded) and loaded.outcome in (RIGHT, SILENT):
            return loaded
        return Verdict(WRONG, f"written, and computes something else than its source, which is {loaded.outcome}")

    def judge_tokens(self, out: Path) -> Verdict | None:
        """Judge a tokenizer that travelled: it must be the source's; None without one."""
        if not any("tokenizer" in edit.text for edit in self.case.edits):
            return None
        there, here = self.ask("tokens", out), self.ask("tokens")
        if here["kind"] != "done":
            return Verdict(WRONG, f"written with a tokenizer that can't be read: {here['text'][:90]}")
        if there == here:
            return None
        if here["tokens"] != self.whole_tokens():
            return Verdict(SILENT, "its tokenizer is another")
        return Verdict(WRONG, "written with another tokenizer than its source's")

    def whole_tokens(self) -> Any:
        return self.ask("tokens", whole(self.root, self.base, self.case.layout)).get("tokens")
