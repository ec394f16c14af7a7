"""The model card of a patched checkpoint: `card.md.jinja`, filled in from its config and its calibration report."""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_qknorm.attend.functions import CAP_BACKENDS
from hf_qknorm.checkpoint import read_config
from hf_qknorm.families import family_of_type
from hf_qknorm.families.class_names import PREFIX, classes_of
from hf_qknorm.families.counterparts import counterpart
from hf_qknorm.files.atomic_io import replace_file, replace_text
from hf_qknorm.files.formatting import format_fixed, shorten
from hf_qknorm.files.log import logger
from hf_qknorm.files.names import CARD, CODE_FILE, KEPT_CARD, PLOT, REPORT, has_tokenizer
from hf_qknorm.files.paths import check_repo_id, is_repo_id, user_path
from hf_qknorm.model.configs import QKNormConfig
from hf_qknorm.norms import NORMS
from hf_qknorm.reports.records import Prediction
from hf_qknorm.reports.report import Calibration

TAG: Final = "hf_qknorm"  # identifies a card that this package generated
PLACEHOLDER: Final = "OWNER/NAME"
INHERITED: Final = ("license", "license_name", "license_link", "language", "datasets", "base_model")
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
    report = _report(path, config)
    fields = _inherited(path / CARD)
    if base := base_model or (report.base_model if report is not None else None):
        fields["base_model"] = base
    bases = [listed] if isinstance(listed := fields.get("base_model", []), str) else listed
    context = _context(path, config, report) | {"repo": repo_id or PLACEHOLDER, "bases": bases}
    start = bases[0] if bases else type(config).__name__.removeprefix("QKNorm").removesuffix("Config")
    context["title"] = (repo_id or f"{start} with {context['description']}").rpartition("/")[2]
    data = _card_data(config, report, fields, context["title"])
    card = ModelCard.from_template(data, template_path=str(Path(__file__).with_name("card.md.jinja")), **context)
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def write_card(
    folder: str | os.PathLike[str], *, repo_id: str | None = None, base_model: str | None = None
) -> tuple[Path, ...]:
    """Write the card to the checkpoint's README.md and its plot beside it, each file atomically; return the paths.

    A card by hf_qknorm is replaced; any other README.md is kept as README.original.md.

    Raises what `render_card` raises, and FileExistsError if there is another README.original.md to keep already, before
    it writes anything.
    """
    path = user_path(folder, "the checkpoint")
    text, report = render_card(path, repo_id=repo_id, base_model=base_model), _report(path)
    card, kept, plot = path / CARD, path / KEPT_CARD, path / PLOT
    keeps = card.is_file() and not (card.is_symlink() or is_generated_card(card))  # a link's target stays
    if keeps and os.path.lexists(kept) and not (kept.is_file() and kept.read_bytes() == card.read_bytes()):
        raise FileExistsError(f"{card} would be kept as {kept}, which exists already: move one of them away")
    if report is not None:
        from hf_qknorm.plots import draw_calibration  # imports matplotlib

        draw_calibration(report, plot)
    else:
        plot.unlink(missing_ok=True)  # of an earlier report
    if keeps:  # a copy: if the new card can't be written, licence and base model are still where they were
        replace_file(kept, lambda path: path.write_bytes(card.read_bytes()))
    replace_text(card, text)
    return (card, *[plot] * (report is not None), *[kept] * keeps)


def is_generated_card(path: Path) -> bool:
    """Whether a file is a card generated by this package, edited or not."""
    return TAG in (_front(path).get("tags") or ())


def auto_class(config: Any) -> str:
    """Return the Auto class that loads the model with its head; `AutoModel` if no other does."""
    architecture = str((config.architectures or [""])[0]).removeprefix(PREFIX)
    found = [auto for auto, names in classes_of(config.base_model_type).items() if architecture in names]
    return next((auto for auto in found if auto in TASKS), next(iter(found), "AutoModel"))


def reads_text(config: Any) -> bool:
    """Return whether a model has a vocabulary, and so a tokenizer."""
    return getattr(config.get_text_config(), "vocab_size", None) is not None


def _report(folder: Path, config: Any = None) -> Calibration | None:
    """Return the report in `folder`, None without one. Raises ValueError, naming it, for a broken or foreign one."""
    path = folder / REPORT
    if not path.is_file():
        return None
    try:
        report = Calibration.load(path)
    except ValueError as error:
        raise ValueError(f"{error}. Remove the file, or calibrate again") from error
    if config is not None and report.scheme != config.scheme:
        raise ValueError(
            f"{path} has the scheme {report.scheme}, and config.json has {config.scheme}: remove the report, or "
            "calibrate again"
        )
    return report


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
        plain = all(isinstance(line, str) and line.isprintable() for line in lines)
        if plain and (key != "base_model" or all(map(is_repo_id, lines))):
            found[key] = value
        else:
            logger.warning("%s of %s is left out of the card: %s", key, path.name, shorten(value))
    return found


def _card_data(config: Any, report: Calibration | None, inherited: dict[str, Any], title: str) -> ModelCardData:
    """Return the front matter of the card."""
    scheme, results = config.scheme, _results(report)
    tags = [TAG, *["qk-norm"] * bool(scheme.q and scheme.k), *["logit-softcapping"] * bool(scheme.softcap)]
    return ModelCardData(
        **inherited,
        base_model_relation="finetune" if "base_model" in inherited else None,
        library_name="transformers",
        pipeline_tag=TASKS.get(auto_class(config)),
        tags=[*tags, config.base_model_type],
        model_name=title if results else None,
        eval_results=results or None,
    )


def _predictions(report: Calibration | None) -> dict[str, Prediction]:
    """A report's predictions by the names of their models in a card; empty without a head."""
    if report is None or report.base is None or report.ones is None or report.chosen is None:
        return {}
    fresh = {"fresh gains": report.ones} if report.scheme.norms else {}
    return {"unpatched": report.base, **fresh, "this model": report.chosen}


def _results(report: Calibration | None) -> list[EvalResult]:
    """The finite losses and perplexities, of this model and of the unpatched one."""
    titles, found = {"this model": "converted", "unpatched": "unpatched"}, _predictions(report)
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type="calibration-text",
            dataset_name="calibration text",
            metric_type=metric,
            metric_name=f"{metric}, {titles[name]}",
            metric_value=round(value, 4),
        )
        for name in titles
        for metric in ("loss", "perplexity")
        if name in found and math.isfinite(value := getattr(found[name], metric))
    ]


def _description(scheme: Any, report: Calibration | None) -> str:
    """Return the scheme in a few words, for example "QK norm and a logit cap"."""
    letters = "".join(letter for letter, norm in zip("QKV", (scheme.q, scheme.k, scheme.v), strict=True) if norm)
    knee = f" (knee {report.shown_knee})" if report is not None and report.knee else ""
    sharp = "sharp " if report is not None and knee and report.sharpness > 1 else ""
    parts = [f"{sharp}{letters} norm{knee}"] if letters else []
    parts += ["a logit cap"] if scheme.softcap is not None else []
    return " and ".join(parts) or "its attention unchanged"


def _context(folder: Path, config: Any, report: Calibration | None) -> dict[str, Any]:
    """The template's variables; none is a text of a file that is not checked."""
    scheme = config.scheme
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
        "description": _description(scheme, report),
        "norms": {norm: NORMS[norm] for norm in scheme.norms},
        "latent": family_of_type(config.base_model_type).latent,
        "backends": ", ".join(f"`{name}`" for name in CAP_BACKENDS if not name.startswith("hf_qknorm")),
        "report": report,
        "predictions": _predictions(report),
        "fixed": format_fixed,
        "largest": {
            when: max(max(getattr(layer, when).max_logit) for layer in layers) for when in ("before", "after") if layers
        },
    }


def _native(config: Any, report: Calibration | None) -> str | None:
    """The model type of transformers that computes the same, if any."""
    sharp = report is not None and (report.sharpness > 1 or report.shown_knee == "∞")
    if not sharp and auto_class(config) == "AutoModelForCausalLM":
        with suppress(ValueError):
            return counterpart(config)
    return None
