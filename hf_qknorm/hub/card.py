"""The model card of a patched checkpoint: rendered from its own config and calibration report, never from guesses.

What comes from others (names of layers, the base model's card) is checked where it is read, and escaped where it is
printed. The template is `model_cards/card.md.jinja`.
"""

from __future__ import annotations

import filecmp
import os
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from hf_qknorm.backends.functions import CAP_BACKENDS
from hf_qknorm.checkpoint.config import read_config
from hf_qknorm.export.targets import find_target
from hf_qknorm.families import FAMILIES
from hf_qknorm.files.atomic_io import replace_file, replace_text
from hf_qknorm.files.formatting import format_fixed
from hf_qknorm.files.hub_names import check_optional_repo_id
from hf_qknorm.files.names import CARD, CODE_FILE, KEPT_CARD, REPORT, TOKENIZER_FILES
from hf_qknorm.files.paths import user_path
from hf_qknorm.hub import papers
from hf_qknorm.hub.metadata import is_ours, loader, metadata
from hf_qknorm.model.configs import QKNormConfig
from hf_qknorm.stats.records import LayerReport, LayerStatistics, Numbers, Prediction
from hf_qknorm.stats.report import Calibration
from hf_qknorm.stats.tables import mean
from hf_qknorm.version import __version__

PLACEHOLDER = "OWNER/NAME"
FIELDS = (("loss", 3), ("perplexity", 2), ("kl", 4))  # of the table of predictions, with their decimals
ROWS = 8  # layers in the table: the worst
SPECIAL = re.compile(r"([\\`*_{}\[\]#|~$!])")


class Markdown(str):
    """Text that is Markdown already: the template prints it as it is, and escapes all else."""

    __slots__ = ()


def render_card(folder: str | os.PathLike[str], *, repo_id: str | None = None) -> str:
    """The card of the patched checkpoint in `folder`, as Markdown; `repo_id` is the name that it will have on the Hub.

    Licence, languages, datasets and base model are taken over from a card that is there. Without a calibration report
    the card says so, and has no tables or plots.

    Raises FileNotFoundError for a folder without a config; ValueError, naming the file, for a model that is not
    patched, for a report or a card that can't be read, and for a report of another scheme.
    """
    path = user_path(folder, "the checkpoint")
    config, report = _config(path), _report(path)
    if report is not None and report.scheme != config.scheme:
        raise ValueError(
            f"{path / REPORT} tells of the scheme {report.scheme}, config.json of {config.scheme}: take it away, "
            "or calibrate again"
        )
    return _template().render(**_context(path, config, report, repo_id))


def write_card(folder: str | os.PathLike[str], *, repo_id: str | None = None) -> tuple[Path, ...]:
    """Render the card into the checkpoint's README.md, and its plots beside it, each whole or not at all.

    A card of ours that is there is replaced; any other README.md is kept as README.original.md. Returns what was
    written; raises what `render_card` raises, and FileExistsError for another README.original.md, before that.
    """
    path = user_path(folder, "the checkpoint")
    text, report = render_card(path, repo_id=repo_id), _report(path)
    kept = _keep_card(path)
    plots: list[str] = []
    if report is not None:
        from hf_qknorm.hub.card_plots import draw_report  # brings matplotlib

        plots = draw_report(report, path)
    replace_text(path / CARD, text)
    return tuple(path / name for name in (CARD, *plots, *kept))


def _keep_card(folder: Path) -> list[str]:
    """Copy a README.md that is no card of ours to a name of its own; returns that name, if it is new."""
    card, kept = folder / CARD, folder / KEPT_CARD
    if card.is_symlink() or not card.is_file() or has_card(folder):
        return []  # of a link, what it points to stays
    if os.path.lexists(kept):
        if kept.is_file() and filecmp.cmp(card, kept, shallow=False):
            return []
        raise FileExistsError(f"{card} is no card of hf_qknorm, and can't be kept: {kept} is there. Move one away")
    replace_file(kept, lambda temporary: shutil.copyfile(card, temporary))
    return [KEPT_CARD]


def has_card(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder's README.md is a card of ours, edited since or not; the base model's own is none."""
    return is_ours(Path(folder) / CARD)


def _config(folder: Path) -> Any:
    config = read_config(folder)
    if not isinstance(config, QKNormConfig):
        raise ValueError(f"{folder} holds a plain {config.model_type}: convert it first (hf-qknorm convert)")
    return config


def _report(folder: Path) -> Calibration | None:
    return Calibration.load(folder / REPORT) if (folder / REPORT).is_file() else None


@cache
def _template() -> Template:
    """The template: inside the package where it is installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    environment = Environment(
        loader=FileSystemLoader([package / "model_cards", package.parent / "model_cards"]),
        autoescape=False,  # that would be HTML; `finalize` escapes Markdown, which holds HTML
        finalize=_escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"markdown": Markdown, "fixed": format_fixed}
    return environment.get_template("card.md.jinja")


def _escaped(value: object) -> str:
    if isinstance(value, Markdown):
        return value
    text = re.sub(r"\s+", " ", str(value)).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return SPECIAL.sub(r"\\\1", text)


def _context(folder: Path, config: Any, report: Calibration | None, repo_id: str | None) -> dict[str, Any]:
    """Everything that the template names."""
    check_optional_repo_id(repo_id, "repo_id")
    scheme = config.scheme
    name = _name(config, report, repo_id)
    card = metadata(folder / CARD, config, report, name)
    behind = papers.papers_of(scheme)
    worst = [] if report is None else sorted(report.layers.items(), key=lambda item: -max(item[1].after.max_logit))
    return {
        "metadata": Markdown(card.to_yaml()),
        "name": name,
        "repo": Markdown(repo_id or PLACEHOLDER),  # checked: letters, digits and -_./ alone
        "named": repo_id is not None,
        "bases": [Markdown(base) for base in _listed(card.base_model)],  # checked, too
        "base_type": config.base_model_type,
        "loader": Markdown(loader(config)),
        "generates": loader(config) == "AutoModelForCausalLM",
        "tokenizer": any((folder / file).is_file() for file in TOKENIZER_FILES),
        "alone": (folder / CODE_FILE).is_file() and bool(getattr(config, "auto_map", None)),
        "native": _native(config),
        "scheme": scheme,
        "spelt": Markdown(", ".join(f"{key}={value!r}" for key, value in _changed(scheme))),
        "in_short": papers.in_short(scheme),
        "changes": [Markdown(sentence) for sentence in papers.in_words(scheme)],
        "blend": config.qk_norm_blend is not None,
        "own_cap": config.attn_logit_softcapping if FAMILIES[config.base_model_type].own_cap else None,
        "backends": [Markdown(f"`{name}`") for name in CAP_BACKENDS if not name.startswith("hf_qknorm")],
        "links": Markdown(" and ".join(", ".join(paper.link for paper in behind).rsplit(", ", 1))),
        "bibtex": Markdown("\n\n".join([*(paper.bibtex for paper in behind), papers.SOFTWARE % __version__])),
        "report": report,
        "predictions": [] if report is None else _predictions(report),
        "layers": [_layer(*item, has_knee=bool(scheme.knee)) for item in worst[:ROWS]],
        "seen": [
            max(max(getattr(layer, side).max_logit) for _, layer in worst) for side in ("before", "after") if worst
        ],
    }


def _changed(scheme: Any) -> list[tuple[str, Any]]:
    """The fields of a scheme that are not as they would be, as one would spell it out."""
    fresh = type(scheme)()
    return [(key, value) for key, value in scheme.to_dict().items() if value != getattr(fresh, key)]


def _listed(value: Any) -> list[str]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _name(config: Any, report: Calibration | None, repo_id: str | None) -> str:
    """What the model is called: on the Hub, or after its base."""
    if repo_id is not None:
        return repo_id.rpartition("/")[2]
    base = type(config).__name__.removeprefix("QKNorm").removesuffix("Config")
    if report is not None and report.base_model is not None:
        base = report.base_model.rpartition("/")[2]
    return f"{base} with {papers.in_short(config.scheme)}"


def _native(config: Any) -> str | None:
    """The model type of transformers that computes the same, if there is one."""
    if config.qk_norm_blend is not None:
        return None
    try:
        return find_target(config).model_type
    except ValueError:
        return None


def _row(*cells: str) -> Markdown:
    return Markdown(f"| {' | '.join(map(_escaped, cells))} |")


def _predictions(report: Calibration) -> list[Markdown]:
    """The rows of the table of predictions."""
    named: dict[str, Prediction | None] = {"unpatched": report.base}
    if report.scheme.norms:
        named["fresh gains"] = report.ones
    named["**this model**"] = report.chosen
    return [
        _row(
            Markdown(name), *(format_fixed(getattr(p, field), digits) for field, digits in FIELDS), f"{p.agreement:.1%}"
        )
        for name, p in named.items()
        if p is not None
    ]


def _layer(name: str, layer: LayerReport, has_knee: bool) -> Markdown:
    """A row of the table of layers."""

    def cells(side: LayerStatistics) -> list[str]:
        return [format_fixed(max(side.max_logit), 1), format_fixed(min(side.entropy), 2), f"{mean(side.over_half):.2%}"]

    largest, *others = (" → ".join(pair) for pair in zip(cells(layer.before), cells(layer.after), strict=True))
    bound = "–" if layer.bound is None else format_fixed(layer.bound, 1)
    beyond = [_means(layer.after.beyond_q, layer.after.beyond_k, ".2%")] if has_knee else []
    return _row(name, largest, bound, *beyond, *others, _means(layer.gain_q, layer.gain_k, ".3g"))


def _means(q: Numbers | None, k: Numbers | None, form: str) -> str:
    """The means over heads of the queries' numbers and of the keys'."""
    return ", ".join("–" if numbers is None else format(mean(numbers), form) for numbers in (q, k))
