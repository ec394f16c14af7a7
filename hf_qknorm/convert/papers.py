"""Descriptions of schemes for model cards, and the papers that they come from."""

from __future__ import annotations

from typing import Final, NamedTuple

from hf_qknorm.ops.norms import NORMS
from hf_qknorm.reports.report import Calibration
from hf_qknorm.scheme import Scheme


class Paper(NamedTuple):
    """A paper: its name in a sentence, and its arXiv number."""

    name: str
    arxiv: str


PAPERS: Final = {
    "rybakov": Paper("Rybakov et al. 2024", "2410.16682"),
    "henry": Paper("Henry et al. 2020", "2010.04245"),
    "lp": Paper("López-Rubio et al. 2026", "2602.05006"),
    "qwen3": Paper("Qwen3", "2505.09388"),
    "gemma2": Paper("Gemma 2", "2408.00118"),
    "latent": Paper("Han et al. 2026", "2606.16310"),
}
NORM_PAPERS: Final = {"rms": ("rybakov",), "layer": ("rybakov",), "l2": ("henry",), "lp": ("henry", "lp")}
GAINS: Final = {
    "shared": "a learned gain for each channel, shared by the heads of a layer",
    "per_head": "a learned gain for each channel of each head",
    "scalar": "one learned scale a layer",
    "none": "no gain",
}
LATENT: Final = (
    ". The channels with and without rotary embedding are normalised separately, the former before it. The cache holds "
    "the latent, from which the keys are computed before they are normalised."
)


def papers_of(scheme: Scheme, latent: bool = False) -> list[Paper]:
    """Return the papers that introduced the parts of a scheme; `latent`: on a model that caches a latent."""
    keys = {key for norm in scheme.norms for key in NORM_PAPERS.get(norm, ())}
    keys |= {"rybakov", "gemma2"} if scheme.softcap is not None else set()
    if scheme.q == scheme.k == "rms":
        keys |= {"latent" if latent else "qwen3"}
    return [paper for key, paper in PAPERS.items() if key in keys]


def short_description(scheme: Scheme, report: Calibration | None = None) -> str:
    """Return the scheme in a few words, for example "QK norm and a logit cap"."""
    letters = "".join(letter for letter, norm in zip("QKV", (scheme.q, scheme.k, scheme.v), strict=True) if norm)
    knee = f" (knee {report.shown_knee})" if report is not None and report.knee else ""
    sharp = "sharp " if report is not None and knee and report.sharpness > 1 else ""
    parts = [f"{sharp}{letters} norm{knee}"] if letters else []
    parts += ["a logit cap"] if scheme.softcap is not None else []
    return " and ".join(parts) or "its attention unchanged"


def mean_in_knee(scheme: Scheme) -> str:
    """Return the name of the mean that a knee is a multiple of."""
    return "mean |x|ᵖ" if any(NORMS[norm].any_order for norm in scheme.norms) else "mean square"


def change_sentences(scheme: Scheme, latent: bool = False, report: Calibration | None = None) -> list[str]:
    """Return the changes that a scheme makes to a model: sentences of Markdown, one for each part.

    `latent`: whether the model caches a latent. The knee is that of the report.
    """
    sentences: list[str] = []
    parts = {"queries": scheme.q, "keys": scheme.k, "values": scheme.v}
    for norm in dict.fromkeys(scheme.norms):
        normed = " and ".join(name for name, its in parts.items() if its == norm)
        order = f" (p = {scheme.p:g})" if NORMS[norm].any_order else ""
        sentences.append(
            f"The **{normed}** of every head are normalised over `head_dim` by {NORMS[norm].title}{order}, with "
            f"{GAINS[scheme.gain]}{' and a bias' if scheme.has_bias(norm) else ''}"
            f"{LATENT if latent else ', before any rotary embedding and before the KV cache.'}"
        )
    if report is not None and report.knee:
        sentences += _knee_sentences(report)
    if scheme.scale is not None:
        sentences.append(f"The products of queries and keys are multiplied by {scheme.scale:g}, not by 1/√head_dim.")
    if scheme.softcap is not None:
        cap = f"{scheme.softcap:g}"
        sentences.append(
            f"Each attention **logit** x becomes {cap}·tanh(x/{cap}) before mask and softmax: none exceeds {cap}."
        )
    if not scheme.pre_norm:
        sentences.append("The **norm before attention** is removed: its gain is folded into the projections.")
    return sentences or ["Nothing: this model computes the same as its base."]


def _knee_sentences(report: Calibration) -> list[str]:
    mean = mean_in_knee(report.scheme)
    sentences = [
        f"These norms have a **knee** of {report.shown_knee}: their ε, otherwise a guard against a division by 0, is "
        f"{report.shown_knee} times the {mean} of calibration text. A vector whose {mean} is much smaller keeps its "
        "length; the length of longer ones is bounded."
    ]
    if report.sharpness > 1:
        s = f"{report.sharpness:g}"
        sentences.append(
            f"They have a **sharpness** of {s}: with m the {mean}, they divide by a root of (ε^{s} + m^{s})^(1/{s}) in "
            "place of ε + m, so that vectors below the knee keep their length almost exactly."
        )
    return sentences
