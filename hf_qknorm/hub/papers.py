"""Descriptions of schemes for model cards, and the papers that they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hf_qknorm.ops.norms import NORMS
from hf_qknorm.scheme import Scheme


@dataclass(frozen=True)
class Paper:
    """A paper: its name in a sentence, its arXiv number, and the fields of its BibTeX entry."""

    name: str
    arxiv: str
    key: str
    title: str
    author: str
    year: int
    booktitle: str | None = None

    @property
    def link(self) -> str:
        """A Markdown link to the paper."""
        return f"[{self.name}](https://arxiv.org/abs/{self.arxiv})"

    @property
    def bibtex(self) -> str:
        """The BibTeX entry."""
        fields = {"title": self.title, "author": self.author, "booktitle": self.booktitle}
        shown = {name: text for name, text in fields.items() if text} | {"year": self.year, "eprint": self.arxiv}
        width = max(map(len, shown))
        lines = [f"  {name:{width}} = {{{value}}},\n" for name, value in shown.items()]
        kind = "inproceedings" if self.booktitle else "misc"
        return f"@{kind}{{{self.key},\n{''.join(lines)}  archivePrefix = {{arXiv}}\n}}"


PAPERS: Final = {
    "rybakov": Paper(
        name="Rybakov et al. 2024",
        arxiv="2410.16682",
        key="rybakov2024stability",
        title="Methods of improving {LLM} training stability",
        author="Rybakov, Oleg and Chrzanowski, Mike and Dykas, Peter and Xue, Jinze and Lanir, Ben",
        year=2024,
    ),
    "henry": Paper(
        name="Henry et al. 2020",
        arxiv="2010.04245",
        key="henry2020qknorm",
        title="Query-Key Normalization for Transformers",
        author="Henry, Alex and Dachapally, Prudhvi Raj and Pawar, Shubham and Chen, Yuxuan",
        year=2020,
        booktitle="Findings of the Association for Computational Linguistics: EMNLP 2020",
    ),
    "lp": Paper(
        name="López-Rubio et al. 2026",
        arxiv="2602.05006",
        key="lopezrubio2026lp",
        title="Enhanced {QKNorm} normalization for neural transformers with the {Lp} norm",
        author="López-Rubio, Ezequiel and Montes-Pérez, Javier and Palomo, Esteban José",
        year=2026,
    ),
    "qwen3": Paper(
        name="Qwen3",
        arxiv="2505.09388",
        key="qwen2025qwen3",
        title="Qwen3 Technical Report",
        author="{Qwen Team}",
        year=2025,
    ),
    "gemma2": Paper(
        name="Gemma 2",
        arxiv="2408.00118",
        key="gemma2024gemma2",
        title="Gemma 2: Improving Open Language Models at a Practical Size",
        author="{Gemma Team}",
        year=2024,
    ),
}
GAINS: Final = {
    "shared": "a learned gain for each channel, shared by the heads of a layer",
    "per_head": "a learned gain for each channel of each head",
    "scalar": "one learned scale a layer",
    "none": "no gain",
}
SOFTWARE: Final = """@software{hf_qknorm,
  title   = {hf_qknorm: stable attention for pretrained Hugging Face language models},
  version = {%s},
  license = {Apache-2.0}
}"""


def papers_of(scheme: Scheme) -> list[Paper]:
    """Return the papers that introduced the parts of a scheme."""
    keys = {key for norm in scheme.norms if norm in NORMS for key in NORMS[norm].papers}
    keys |= {"rybakov", "gemma2"} if scheme.softcap is not None else set()
    keys |= {"qwen3"} if scheme.q == scheme.k == "rms" else set()
    return [paper for key, paper in PAPERS.items() if key in keys]


def short_description(scheme: Scheme) -> str:
    """Return the scheme in a few words, for example "QK norm and a logit cap"."""
    letters = "".join(letter for letter, norm in zip("QKV", (scheme.q, scheme.k, scheme.v), strict=True) if norm)
    parts = [f"{letters} norm" + (f" (knee {scheme.knee:g})" if scheme.knee else "")] if letters else []
    parts += ["a logit cap"] if scheme.softcap is not None else []
    return " and ".join(parts) or "its attention unchanged"


def change_sentences(scheme: Scheme) -> list[str]:
    """Return what the scheme changes in a model: sentences of Markdown, one for each part."""
    sentences: list[str] = []
    parts = {"queries": scheme.q, "keys": scheme.k, "values": scheme.v}
    for norm in dict.fromkeys(scheme.norms):
        normed = " and ".join(name for name, its in parts.items() if its == norm)
        order = f" (p = {scheme.p:g})" if NORMS[norm].any_order else ""
        sentences.append(
            f"The **{normed}** of every head are normalised over `head_dim` by {NORMS[norm].title}{order}, with "
            f"{GAINS[scheme.gain]}{' and a bias' if scheme.has_bias(norm) else ''}"
            ", before any rotary embedding and before the KV cache."
        )
    if scheme.knee:
        mean = "mean |x|ᵖ" if any(NORMS[norm].any_order for norm in scheme.norms) else "mean square"
        sentences.append(
            f"These norms have a **knee** of {scheme.knee:g}: their ε, otherwise a guard against a division by 0, is "
            f"{scheme.knee:g} times the {mean} of calibration text (a buffer of each norm, `q_norm.eps`). A vector "
            f"whose {mean} is much smaller keeps its length; the length of longer ones is bounded."
        )
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
