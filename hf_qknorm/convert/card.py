"""The model card of a patched checkpoint: `card.md.jinja`, filled in from its config and its calibration report."""

from __future__ import annotations

import filecmp
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any, Final

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_qknorm.attend.functions import CAP_BACKENDS
from hf_qknorm.checkpoint import read_config
from hf_qknorm.convert import papers
from hf_qknorm.families import family_of_type
from hf_qknorm.families.class_names import PREFIX, classes_of
from hf_qknorm.families.counterparts import counterpart
from hf_qknorm.files.atomic_io import replace_file, replace_text
from hf_qknorm.files.formatting import format_fixed, shorten
from hf_qknorm.files.hub_names import check_repo_id
from hf_qknorm.files.log import logger
from hf_qknorm.files.names import CARD, CODE_FILE, KEPT_CARD, PLOT, REPORT, TOKENIZER_FILES
from hf_qknorm.files.paths import user_path
from hf_qknorm.measure.predictions import predictions_of
from hf_qknorm.model.configs import QKNormConfig
from hf_qknorm.reports.report import MEASURED, Calibration

TAG: Final = "hf_qknorm"  # identifies a card that this package generated
PLACEHOLDER: Final = "OWNER/NAME"
INHERITED: Final = ("license", "license_name", "license_link", "language", "datasets", "base_model")
ENTRIES, LENGTH = 200, 200  # limits on an inherited list, and on a text in it
TASKS: Final = {  # the Hub's task names by Auto class
    "AutoModel": "feature-extraction",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForImageClassification": "image-classification",
}


def render_card(folder: str | os.PathLike[str], *, repo_id: str | None = None, base_model: str | None = None) -> str:
    """Return the card of the patched checkpoint in `folder` as Markdown; `repo_id` is its future name on the Hub.

    `base_model` is the name on the Hub of the model that was converted; by default the report's. Licence, languages,
    datasets and base model come from the folder's README.md, if it has these.

    Raises FileNotFoundError for a folder without a config; ValueError, naming the file, for a model that is not
    patched, an invalid report, and a report of another scheme.
    """
    if repo_id is not None:
        check_repo_id(repo_id, "repo_id")
    path = user_path(folder, "the checkpoint")
    config = read_config(path)
    if not isinstance(config, QKNormConfig):
        raise ValueError(f"{path} holds a plain {config.model_type}: convert it first (hf-qknorm convert)")
    report = current_report(path)
    if report is not None and report.scheme != config.scheme:
        raise ValueError(
            f"{path / REPORT} has the scheme {report.scheme}, and config.json has {config.scheme}: remove the report, "
            "or calibrate again"
        )
    base_model = report.base_model if base_model is None and report is not None else base_model
    data = _card_data(path, config, report, repo_id, base_model)
    bases = [data.base_model] if isinstance(data.base_model, str) else data.base_model or []
    template = Path(__file__).with_name("card.md.jinja")
    context = _context(path, config, report) | {"repo": repo_id or PLACEHOLDER, "bases": bases}
    title = _title(config, repo_id, bases, report)
    card = ModelCard.from_template(data, template_path=str(template), title=title, **context)
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def write_card(
    folder: str | os.PathLike[str], *, repo_id: str | None = None, base_model: str | None = None
) -> tuple[Path, ...]:
    """Write the card to the checkpoint's README.md and its plot beside it, each file atomically; return the paths.

    A card by hf_qknorm is replaced; any other README.md is kept as README.original.md.

    Raises what `render_card` raises, and FileExistsError for a different README.original.md, before it writes anything.
    """
    path = user_path(folder, "the checkpoint")
    text, report = render_card(path, repo_id=repo_id, base_model=base_model), current_report(path)
    kept = [KEPT_CARD] if _must_keep_card(path) else []
    if kept:
        replace_file(path / KEPT_CARD, lambda temporary: shutil.copyfile(path / CARD, temporary))
    drawn = [PLOT] if report is not None else []
    if report is not None:
        from hf_qknorm.plots import draw_calibration  # imports matplotlib

        draw_calibration(report, path / PLOT)
    replace_text(path / CARD, text)
    if not drawn:  # of an earlier report
        (path / PLOT).unlink(missing_ok=True)
    return tuple(path / name for name in (CARD, *drawn, *kept))


def current_report(folder: Path) -> Calibration | None:
    """Return the report in `folder`, None without one. Raises ValueError, naming the file, for a broken one."""
    if not (folder / REPORT).is_file():
        return None
    try:
        return Calibration.load(folder / REPORT)
    except ValueError as error:
        raise ValueError(
            f"{error}. Remove the file, or write a new one with `hf-qknorm card FOLDER --data TEXT`"
        ) from error


def is_generated_card(path: Path) -> bool:
    """Whether a file is a card generated by this package, edited or not."""
    return TAG in (_front(path).get("tags") or ())


def auto_class(config: Any) -> str:
    """Return the Auto class that loads the model with its head; `AutoModel` if no other does."""
    architecture = str((config.architectures or [""])[0]).removeprefix(PREFIX)
    found = [auto for auto, names in classes_of(config.base_model_type).items() if architecture in names]
    return next((auto for auto in found if auto in TASKS), next(iter(found), "AutoModel"))


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has files of a tokenizer."""
    return any((folder / file).is_file() for file in TOKENIZER_FILES)


def reads_text(config: Any) -> bool:
    """Return whether a model has a vocabulary, and so a tokenizer."""
    return getattr(config.get_text_config(), "vocab_size", None) is not None


def _front(path: Path) -> dict[str, Any]:
    """Return the front matter of a card; empty, with a warning, if it can't be read."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if not text.lstrip().startswith("---"):
        return {}
    try:
        data: Any = ModelCard(text, ignore_metadata_errors=True).data
        return dict(data.to_dict())
    except (ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        logger.warning("the front matter of %s is left out of the card: %s", path.name, shorten(str(error)))
        return {}


def _inherited(path: Path) -> dict[str, Any]:
    """Return licence, languages, datasets and base model of a card; other values than lines of text are left out."""
    found: dict[str, Any] = {}
    for key, value in _front(path).items():
        if key not in INHERITED or value in (None, "", []):
            continue
        lines = value if isinstance(value, list) else [value]
        if key == "language":
            lines = ["no" if line is False else line for line in lines]  # Norwegian, as YAML reads it without quotes
        known = len(lines) <= ENTRIES and all(map(_is_line, lines))
        try:
            for line in lines if known and key == "base_model" else ():
                check_repo_id(line, key)
        except ValueError:
            known = False
        if known:
            found[key] = lines if isinstance(value, list) else lines[0]
        else:
            logger.warning("%s of %s is left out of the card: %s", key, path.name, shorten(value))
    return found


def _is_line(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= LENGTH


def _card_data(
    folder: Path, config: Any, report: Calibration | None, repo_id: str | None, base_model: str | None
) -> ModelCardData:
    """Return the front matter of the card."""
    fields = _inherited(folder / CARD) | ({"base_model": base_model} if base_model else {})
    if report and report.dataset:
        known = fields.get("datasets", [])
        fields["datasets"] = list(dict.fromkeys([*([known] if isinstance(known, str) else known), report.dataset]))
    bases = fields.get("base_model")
    title = _title(config, repo_id, [bases] if isinstance(bases, str) else bases or [], report)
    scheme, results = config.scheme, _results(report)
    tags = [TAG, *(["qk-norm"] if scheme.q and scheme.k else []), *(["logit-softcapping"] if scheme.softcap else [])]
    return ModelCardData(
        **fields,
        base_model_relation="finetune" if bases else None,
        library_name="transformers",
        pipeline_tag=TASKS.get(auto_class(config)),
        tags=[*tags, config.base_model_type],
        model_name=title if results else None,
        eval_results=results or None,
    )


def _results(report: Calibration | None) -> list[EvalResult]:
    """The finite losses and perplexities, of this model and of the unpatched one."""
    text = "local text" if report is not None and report.method == MEASURED else "calibration text"
    dataset = None if report is None else report.dataset
    titles, found = {"this model": "converted", "unpatched": "unpatched"}, predictions_of(report)
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset or text.replace(" ", "-"),
            dataset_name=dataset or text,
            metric_type=metric,
            metric_name=f"{metric}, {titles[name]}",
            metric_value=round(value, 4),
        )
        for name in titles
        for metric in ("loss", "perplexity")
        if name in found and math.isfinite(value := getattr(found[name], metric))
    ]


def _title(config: Any, repo_id: str | None, bases: list[str], report: Calibration | None) -> str:
    """The model's name on the Hub, or one after its base."""
    if repo_id is not None:
        return repo_id.rpartition("/")[2]
    base = type(config).__name__.removeprefix("QKNorm").removesuffix("Config")
    return f"{bases[0].rpartition('/')[2] if bases else base} with {papers.short_description(config.scheme, report)}"


def _context(folder: Path, config: Any, report: Calibration | None) -> dict[str, Any]:
    """The template's variables; none is a text of a file that is not checked."""
    scheme, latent = config.scheme, family_of_type(config.base_model_type).latent
    defaults = type(scheme)()
    layers = [] if report is None else [*report.layers.values()]
    fields = [f"{key}={value!r}" for key, value in scheme.to_dict().items() if value != getattr(defaults, key)]
    return {
        "config": config,
        "auto_class": auto_class(config),
        "tokenizer": has_tokenizer(folder),
        "reads_text": reads_text(config),
        "standalone": (folder / CODE_FILE).is_file() and bool(getattr(config, "auto_map", None)),
        "native": _native(config, report),
        "scheme": scheme,
        "scheme_fields": ", ".join(fields),
        "description": papers.short_description(scheme, report),
        "changes": papers.change_sentences(scheme, latent, report),
        "backends": ", ".join(f"`{name}`" for name in CAP_BACKENDS if not name.startswith("hf_qknorm")),
        "papers": papers.papers_of(scheme, latent),
        "report": report,
        "measured": report is not None and report.method == MEASURED,
        "predictions": predictions_of(report),
        "fixed": format_fixed,
        "largest": {
            when: max(max(getattr(layer, when).max_logit) for layer in layers)
            for when in ("before", "after")
            if layers and getattr(layers[0], when) is not None
        },
    }


def _native(config: Any, report: Calibration | None) -> str | None:
    """The model type of transformers that computes the same, if any."""
    sharp = report is not None and (report.sharpness > 1 or report.shown_knee == "∞")
    if sharp or auto_class(config) != "AutoModelForCausalLM":
        return None
    try:
        return counterpart(config)
    except ValueError:
        return None


def _must_keep_card(folder: Path) -> bool:
    """Whether a README.md would be lost. Raises FileExistsError for a different README.original.md."""
    card, kept = folder / CARD, folder / KEPT_CARD
    if card.is_symlink() or not card.is_file() or is_generated_card(card):
        return False  # the target of a link is not replaced
    if not os.path.lexists(kept):
        return True
    if kept.is_file() and filecmp.cmp(card, kept, shallow=False):
        return False
    raise FileExistsError(f"{card} would be replaced, and its copy {kept} exists already: move one of them away")
