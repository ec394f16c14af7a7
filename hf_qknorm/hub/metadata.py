"""The front matter of model cards: what is taken over from a stranger's, and what ours says."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData

from hf_qknorm.families.class_names import AUTO_CLASSES, PREFIX
from hf_qknorm.files.formatting import shorten
from hf_qknorm.files.hub_names import check_optional_repo_id
from hf_qknorm.files.untrusted import read_text
from hf_qknorm.stats.report import Calibration

TAG = "hf_qknorm"  # by which a card of ours is known
CARD_BYTES, FRONT_BYTES, ENTRIES, LENGTH = 4 * 2**20, 2**16, 200, 200
CARRIED = ("license", "license_name", "license_link", "language", "datasets", "base_model")
FRONT = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
TASKS = {  # the Hub's names of what a model does, by the Auto class that it is loaded with
    "AutoModel": "feature-extraction",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForImageClassification": "image-classification",
}


def front_matter(path: Path) -> dict[str, Any]:
    """The front matter of a card, all its scalars as they are spelt; empty without a card or without any.

    Raises ValueError, naming the file, for a card or a front matter that is too large or can't be read.
    """
    if not path.is_file():
        return {}
    found = FRONT.match(read_text(path, CARD_BYTES))
    if found is None:
        return {}
    text = found[1]
    try:
        if len(text) > FRONT_BYTES:
            raise ValueError(f"{len(text):,} characters, at most {FRONT_BYTES:,} are read")
        _check_events(text)
        # Scalars stay text: `no` is Norwegian, and nothing becomes a date or an object.
        data = yaml.load(text, Loader=yaml.BaseLoader)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"{path}: its front matter can't be read ({shorten(str(error))}): mend it, or take it away"
        ) from None
    if data in (None, ""):
        return {}
    if not isinstance(data, dict):
        raise ValueError(f"{path}: its front matter is {shorten(data)}, expected a mapping")
    return data


def _check_events(text: str) -> None:
    """Raise ValueError for aliases, which may multiply without end, for tags, and for what is nested deeply."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.BaseLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("aliases (*name) are not read")
        if getattr(event, "tag", None) is not None:
            raise ValueError(f"tags ({event.tag}) are not read")
        if depth > 20:
            raise ValueError("it is nested too deeply")


def carried(path: Path) -> dict[str, list[str]]:
    """What a card's front matter says of licence, languages, datasets and base model, each as a list of strings.

    Raises ValueError, naming the file and the key, for a value that is no short text or list of such.
    """
    data = front_matter(path)
    return {key: _strings(data[key], f"{path}: {key}") for key in CARRIED if data.get(key)}


def _strings(value: Any, where: str) -> list[str]:
    values = value if isinstance(value, list) else [value]
    if len(values) > ENTRIES:
        raise ValueError(f"{where} has {len(values):,} entries, expected at most {ENTRIES}")
    for item in values:
        if not isinstance(item, str) or not item.isprintable() or not 0 < len(item) <= LENGTH:
            raise ValueError(f"{where} is {shorten(item)}, expected a line of text, or a list of them")
    return list(dict.fromkeys(values))


def is_ours(path: Path) -> bool:
    """Whether a file is a card that was rendered here, edited since or not."""
    try:
        tags = front_matter(path).get("tags")
    except ValueError:
        return False
    return isinstance(tags, list) and TAG in tags


def metadata(path: Path, config: Any, report: Calibration | None, name: str) -> ModelCardData:
    """The front matter of our card for the model `name`, with what the card at `path` says of where it comes from.

    Raises ValueError as `carried` does.
    """
    known = carried(path)
    base = [report.base_model] if report and report.base_model else known.pop("base_model", [])
    for item in base:
        check_optional_repo_id(item, f"{path}: base_model")
    datasets = dict.fromkeys([*known.get("datasets", []), *([report.dataset] if report and report.dataset else [])])
    scheme = config.scheme
    tags = [TAG, *(["qk-norm"] if scheme.q and scheme.k else []), *(["logit-softcapping"] if scheme.softcap else [])]
    return ModelCardData(
        **{key: _one(values) for key, values in known.items() if key not in ("datasets", "base_model")},
        base_model=_one(base),
        base_model_relation="finetune" if base else None,
        datasets=list(datasets) or None,
        library_name="transformers",
        pipeline_tag=TASKS.get(loader(config)),
        tags=[*tags, config.base_model_type],
        model_name=name if report and report.chosen else None,
        eval_results=_results(report) or None,
    )


def _one(values: list[str]) -> Any:
    return values[0] if len(values) == 1 else values or None


def loader(config: Any) -> str:
    """The Auto class that loads the model with all that it has; `AutoModel` where none is known."""
    architecture = str((config.architectures or [""])[0]).removeprefix(PREFIX)
    found = [auto for auto, names in AUTO_CLASSES.items() if names.get(config.base_model_type) == architecture]
    return next((auto for auto in found if auto in TASKS), next(iter(found), "AutoModel"))


def _results(report: Calibration | None) -> list[EvalResult]:
    """What was measured, unpatched and converted; numbers that are not finite have no place in an index."""
    if report is None or report.base is None or report.chosen is None:
        return []
    results = []
    for what, prediction in (("converted", report.chosen), ("unpatched", report.base)):
        for metric, value in (("loss", prediction.loss), ("perplexity", prediction.perplexity)):
            if math.isfinite(value):
                results.append(
                    EvalResult(
                        task_type="text-generation",
                        dataset_type=report.dataset or "calibration-text",
                        dataset_name=report.dataset or "calibration text",
                        metric_type=metric,
                        metric_name=f"{metric}, {what}",
                        metric_value=round(value, 4),
                    )
                )
    return results
