"""What a scheme does, in words, and the papers behind it: for those who read a model card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hf_qknorm.ops.norms import NORMS
from hf_qknorm.scheme import Scheme


@dataclass(frozen=True)
class Paper:
    """How a paper is named in a sentence, where it is, and its BibTeX entry."""

    name: str
    arxiv: str
    bibtex: str

    @property
    def link(self) -> str:
        """It, as Markdown."""
        return f"[{self.name}](https://arxiv.org/abs/{self.arxiv})"


PAPERS: Final[dict[str, Paper]] = {
    "rybakov": Paper(
        "Rybakov et al. 2024",
        "2410.16682",
        """@misc{rybakov2024stability,
  title  = {Methods of improving {LLM} training stability},
  author = {Rybakov, Oleg and Chrzanowski, Mike and Dykas, Peter and Xue, Jinze and Lanir, Ben},
  year   = {2024},
  eprint = {2410.16682},
  archivePrefix = {arXiv}
}""",
    ),
    "henry": Paper(
        "Henry et al. 2020",
        "2010.04245",
        """@inproceedings{henry2020qknorm,
  title     = {Query-Key Normalization for Transformers},
  author    = {Henry, Alex and Dachapally, Prudhvi Raj and Pawar, Shubham and Chen, Yuxuan},
  booktitle = {Findings of the Association for Computational Linguistics: EMNLP 2020},
  year      = {2020},
  eprint    = {2010.04245},
  archivePrefix = {arXiv}
}""",
    ),
    "lp": Paper(
        "López-Rubio et al. 2026",
        "2602.05006",
        """@misc{lopezrubio2026lp,
  title  = {Enhanced {QKNorm} normalization for neural transformers with the {Lp} norm},
  author = {López-Rubio, Ezequiel and Montes-Pérez, Javier and Palomo, Esteban José},
  year   = {2026},
  eprint = {2602.05006},
  archivePrefix = {arXiv}
}""",
    ),
    "qwen3": Paper(
        "Qwen3",
        "2505.09388",
        """@misc{qwen2025qwen3,
  title  = {Qwen3 Technical Report},
  author = {{Qwen Team}},
  year   = {2025},
  eprint = {2505.09388},
  archivePrefix = {arXiv}
}""",
    ),
    "gemma2": Paper(
        "Gemma 2",
        "2408.00118",
        """@misc{gemma2024gemma2,
  title  = {Gemma 2: Improving Open Language Models at a Practical Size},
  author = {{Gemma Team}},
  year   = {2024},
  eprint = {2408.00118},
  archivePrefix = {arXiv}
}""",
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
    """The papers that the parts of a scheme come from."""
    keys = {key for norm in scheme.norms if norm in NORMS for key in NORMS[norm].papers}
    keys |= {"rybakov", "gemma2"} if scheme.softcap is not None else set()
    keys |= {"qwen3"} if scheme.q == scheme.k == "rms" else set()
    return [paper for key, paper in PAPERS.items() if key in keys]


def in_short(scheme: Scheme) -> str:
    """`QK norm and a logit cap`."""
    letters = "".join(letter for letter, norm in zip("QKV", (scheme.q, scheme.k, scheme.v), strict=True) if norm)
    parts = [f"{letters} norm" + (f" (knee {scheme.knee:g})" if scheme.knee else "")] if letters else []
    parts += ["a logit cap"] if scheme.softcap is not None else []
    return " and ".join(parts) or "its attention unchanged"


def in_words(scheme: Scheme) -> list[str]:
    """What the scheme changes, a sentence of Markdown for each part."""
    sentences: list[str] = []
    parts = {"queries": scheme.q, "keys": scheme.k, "values": scheme.v}
    for norm in dict.fromkeys(scheme.norms):
        who = " and ".join(name for name, its in parts.items() if its == norm)
        order = f" (p = {scheme.p:g})" if NORMS[norm].any_order else ""
        sentences.append(
            f"The **{who}** of every head are normalised over `head_dim` by {NORMS[norm].title}{order}, with "
            f"{GAINS[scheme.gain]}{' and a bias' if scheme.has_bias(norm) else ''}"
            ", before any rotary embedding and before the KV cache."
        )
    if scheme.knee:
        mean = "mean |x|ᵖ" if any(NORMS[norm].any_order for norm in scheme.norms) else "mean square"
        sentences.append(
            f"These norms have a **knee** of {scheme.knee:g}: their ε, which else guards against a division by 0, is "
            f"{scheme.knee:g} times the {mean} of calibration text (a buffer of each norm, `q_norm.eps`). Vectors much "
            "shorter than that keep their length, longer ones are bounded."
        )
    if scheme.scale is not None:
        sentences.append(f"The products of queries and keys are multiplied by {scheme.scale:g}, not by 1/√head_dim.")
    if scheme.softcap is not None:
        cap = f"{scheme.softcap:g}"
        sentences.append(
            f"Each attention **logit** x becomes {cap}·tanh(x/{cap}) before mask and softmax: none exceeds {cap}."
        )
    if not scheme.pre_norm:
        sentences.append("The **norm in front of attention** is gone, folded into the projections.")
    return sentences or ["Nothing: this model computes what it did before."]
