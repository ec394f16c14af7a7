"""The model card of a patched checkpoint, rendered by `card.md.jinja` from its config and its calibration report.

Text from untrusted files (names of layers, the base model's card) is checked when it is read and escaped when it is
rendered.
"""

from __future__ import annotations

import filecmp
import os
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from hf_qknorm.attend.functions import CAP_BACKENDS
from hf_qknorm.checkpoint.config import read_config
from hf_qknorm.export.targets import find_target
from hf_qknorm.families import FAMILIES
from hf_qknorm.files.atomic_io import replace_file, replace_text
from hf_qknorm.files.formatting import format_fixed
from hf_qknorm.files.hub_names import check_optional_repo_id
from hf_qknorm.files.names import CARD, CODE_FILE, KEPT_CARD, PLOTS, REPORT, TOKENIZER_FILES
from hf_qknorm.files.paths import user_path
from hf_qknorm.hub import papers
from hf_qknorm.hub.metadata import (
    auto_class,
    card_data,
    current_report,
    inherited_fields,
    is_generated_card,
    predictions_of,
)
from hf_qknorm.model.configs import QKNormConfig
from hf_qknorm.ops.norms import NORMS
from hf_qknorm.reports.report import MEASURED, Calibration
from hf_qknorm.reports.tables import mean
from hf_qknorm.version import __version__

PLACEHOLDER = "OWNER/NAME"
PLACEHOLDER_NOTE = f"(Replace `{PLACEHOLDER}` by the folder of this checkpoint or its name on the Hub.)"
ROWS = 8  # layers in the table, those with the largest logits
SPECIAL = re.compile(r"([\\`*_{}\[\]#|~$!])")  # characters with a meaning in Markdown


class Markdown(str):
    """Markdown, which the template prints unchanged; it escapes all other text."""


def render_card(folder: str | os.PathLike[str], *, repo_id: str | None = None) -> str:
    """Return the card of the patched checkpoint in `folder` as Markdown; `repo_id` is its future name on the Hub.

    Licence, languages, datasets and base model come from the folder's README.md, if it has these. Without a calibration
    report the card has no tables or plots, and says so. Of a report that was measured before the weights changed, it
    has the losses, as such.

    Raises FileNotFoundError for a folder without a config; ValueError, with the file's name, for a model that is not
    patched, for an invalid report or card, and for a report of another scheme.
    """
    path = user_path(folder, "the checkpoint")
    return _render(path, current_report(path), repo_id, None)


def write_card(
    folder: str | os.PathLike[str], *, repo_id: str | None = None, base_model: str | None = None
) -> tuple[Path, ...]:
    """Write the card to the checkpoint's README.md and its plots beside it, each file atomically; return the paths.

    A card by hf_qknorm is replaced; any other README.md is kept as README.original.md. `base_model` is the name on the
    Hub of the converted model; by default the report's, or the README.md's own base model.

    Raises what `render_card` raises, and FileExistsError for a different README.original.md, before it writes anything.
    """
    path = user_path(folder, "the checkpoint")
    report = current_report(path)
    text = _render(path, report, repo_id, base_model)
    kept = [KEPT_CARD] if _must_keep_card(path) else []
    if kept:
        replace_file(path / KEPT_CARD, lambda temporary: shutil.copyfile(path / CARD, temporary))
    plots: list[str] = []
    if report is not None and not report.stale:
        from hf_qknorm.hub.card_plots import draw_report  # imports matplotlib

        plots = draw_report(report, path)
    replace_text(path / CARD, text)
    for name in {*PLOTS} - {*plots}:  # of an earlier report
        (path / name).unlink(missing_ok=True)
    return tuple(path / name for name in (CARD, *plots, *kept))


def check_card(folder: Path, *, repo_id: str | None = None) -> None:
    """Raise what `write_card` raises for `repo_id` and for the README.md in `folder`. Writes nothing."""
    check_optional_repo_id(repo_id, "repo_id")
    inherited_fields(folder / CARD)
    _must_keep_card(folder)


def with_repository(text: str, repo_id: str) -> str:
    """Return the text of a card with the name `repo_id` for the placeholder, and without the note on it."""
    return text.replace(f"{PLACEHOLDER_NOTE}\n\n", "").replace(PLACEHOLDER, repo_id)


def _render(folder: Path, report: Calibration | None, repo_id: str | None, base_model: str | None) -> str:
    """`render_card` with the folder's report."""
    config = read_config(folder)
    if not isinstance(config, QKNormConfig):
        raise ValueError(f"{folder} holds a plain {config.model_type}: convert it first (hf-qknorm convert)")
    if report is not None and not report.stale and report.scheme != config.scheme:
        raise ValueError(
            f"{folder / REPORT} has the scheme {report.scheme}, and config.json has {config.scheme}: remove the "
            "report, or calibrate again"
        )
    return _template().render(**_context(folder, config, report, repo_id, base_model))


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


@cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=False,  # escapes HTML; `finalize` escapes Markdown, which includes HTML
        finalize=_escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"markdown": Markdown, "fixed": format_fixed, "mean": mean}
    return environment.get_template("card.md.jinja")


def _escaped(value: object) -> str:
    if isinstance(value, Markdown):
        return value
    text = re.sub(r"\s+", " ", str(value)).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return SPECIAL.sub(r"\\\1", text)


def _context(
    folder: Path, config: Any, report: Calibration | None, repo_id: str | None, base_model: str | None
) -> dict[str, Any]:
    """The template's variables."""
    check_optional_repo_id(repo_id, "repo_id")
    scheme, latent = config.scheme, FAMILIES[config.base_model_type].latent
    base_model = report.base_model if base_model is None and report is not None else base_model
    current = None if report is None or report.stale else report
    name = _name(config, base_model, repo_id, current)
    front = card_data(folder / CARD, config, report, name, base_model)
    bases = [front.base_model] if isinstance(front.base_model, str) else front.base_model or []
    layers = [] if current is None else sorted(current.layers.items(), key=lambda item: -max(item[1].after.max_logit))
    defaults = type(scheme)()
    set_fields = [f"{key}={value!r}" for key, value in scheme.to_dict().items() if value != getattr(defaults, key)]
    return {
        "metadata": Markdown(front.to_yaml()),
        "name": name,
        "repo": Markdown(repo_id or PLACEHOLDER),  # checked: letters, digits and -_./ alone
        "note": Markdown(PLACEHOLDER_NOTE) if repo_id is None else None,
        "bases": [Markdown(base) for base in bases],  # checked, too
        "config": config,
        "auto_class": Markdown(auto_class(config)),
        "tokenizer": has_tokenizer(folder),
        "reads_text": reads_text(config),
        "standalone": (folder / CODE_FILE).is_file() and bool(getattr(config, "auto_map", None)),
        "native": _native(config, current),
        "sixteen_bits": str(config.dtype).endswith("16"),
        "scheme": scheme,
        "scheme_fields": Markdown(", ".join(set_fields)),
        "description": papers.short_description(scheme, current),
        "mean_in_knee": Markdown(papers.mean_in_knee(scheme)),
        "divides_by_mean": any(not NORMS[norm].summed for norm in scheme.norms),
        "changes": [Markdown(sentence) for sentence in papers.change_sentences(scheme, latent, current)],
        "own_cap": config.attn_logit_softcapping if FAMILIES[config.base_model_type].own_cap else None,
        "backends": [Markdown(f"`{name}`") for name in CAP_BACKENDS if not name.startswith("hf_qknorm")],
        "papers": papers.papers_of(scheme, latent),
        "version": __version__,
        "report": current,
        "measured": current is not None and current.method == MEASURED,
        "stale": report if report is not None and report.stale else None,
        "predictions": predictions_of(report),
        "layers": layers[:ROWS],
    }


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has files of a tokenizer."""
    return any((folder / file).is_file() for file in TOKENIZER_FILES)


def reads_text(config: Any) -> bool:
    """Return whether a model has a vocabulary, and so a tokenizer."""
    return getattr(config.get_text_config(), "vocab_size", None) is not None


def _name(config: Any, base_model: str | None, repo_id: str | None, report: Calibration | None) -> str:
    """The model's name on the Hub, or one after its base."""
    if repo_id is not None:
        return repo_id.rpartition("/")[2]
    base = type(config).__name__.removeprefix("QKNorm").removesuffix("Config")
    if base_model is not None:
        base = base_model.rpartition("/")[2]
    return f"{base} with {papers.short_description(config.scheme, report)}"


def _native(config: Any, report: Calibration | None) -> str | None:
    """The model type of transformers that computes the same, if any."""
    if report is not None and (report.sharpness > 1 or report.shown_knee == "∞"):
        return None
    try:
        found = find_target(config).model_type
    except ValueError:
        return None
    return found if found == config.base_model_type or auto_class(config) == "AutoModelForCausalLM" else None
