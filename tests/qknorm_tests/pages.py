"""The Markdown pages of the repository: their snippets, links, headings, and the code that they name."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for folder, pattern in (
        (ROOT, "*.md"),
        *((ROOT / name, "**/*.md") for name in (".github", "hf_qknorm", "model_cards", "recipes")),
    )
    for path in folder.glob(pattern)
)
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
WRITTEN = [name for name in NAMES if not name.startswith(("model_cards/", "recipes/results/"))]  # the others are made
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
NO_RUN = re.compile(r"python no-run: \w.+")


@dataclass(frozen=True)
class Snippet:
    """A fenced block: its page, the line of its first fence, the text behind that fence, the code, and its output.

    `output` is the block of language "text" that follows directly, or None.
    """

    page: str
    line: int
    info: str
    code: str
    output: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def language(self) -> str:
        return self.info.partition(" ")[0]

    @property
    def runs(self) -> bool:
        """Whether the page leaves the snippet to be run: one that says "no-run" and why is only compiled."""
        return self.info == "python"


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def prose_of(name: str) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", text_of(name))


def snippets(name: str) -> list[Snippet]:
    text = text_of(name)
    found = list(FENCE.finditer(text))
    result = []
    for block, following in zip_longest(found, found[1:]):
        shown = following is not None and following[1] == "text" and not text[block.end() : following.start()].strip()
        output = following[2] if following is not None and shown else None
        result.append(Snippet(name, text.count("\n", 0, block.start()) + 1, block[1].strip(), block[2], output))
    return result


def all_snippets(names: list[str], language: str) -> list[Snippet]:
    return [snippet for name in names for snippet in snippets(name) if snippet.language == language]


def links(name: str) -> list[str]:
    """The targets of the page's links and images, those to other sites left out."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(name)) if not re.match(r"[a-z]+:", target)]


def anchors(name: str) -> set[str]:
    """The anchors that GitHub gives the page's headings."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", prose_of(name), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def code_files(name: str) -> list[str]:
    """The Python files, configurations and templates that the page names in backticks."""
    return re.findall(r"`([\w./-]+\.(?:py|ya?ml|json|jinja|toml))`", prose_of(name))


def named_code(name: str) -> Iterator[tuple[str, str]]:
    """Each function or class that the page names together with its file: `f` in `x.py`, `f` of `x.py`, `f` (`x.py`)."""
    file = r"`([\w./-]+\.py)`"
    text = prose_of(name)
    for match in re.finditer(rf"((?:`\w+`(?:, | and | or )?)+),? (?:in|of) {file}", text):
        yield from ((code, match[2]) for code in re.findall(r"`(\w+)`", match[1]))
    for match in re.finditer(rf"`(\w+)` \({file}\)", text):
        yield match[1], match[2]
