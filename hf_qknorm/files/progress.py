"""Progress bars in terminals and in notebooks; where the output goes to a file or a pipe, a line a minute."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm  # a widget in notebooks with ipywidgets, else text

SECONDS_OF_A_LINE = 60.0
LINE = "{desc}: {n_fmt} of {total_fmt} after {elapsed}, about {remaining} left"


def progress_bar(items: Iterable[Any] | None = None, **options: Any) -> Any:
    """A tqdm bar that is removed at its end. `options` are tqdm's; TQDM_DISABLE=1 in the environment hides it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if sys.stderr is None:  # under pythonw
        options["disable"] = True
    elif not (sys.stderr.isatty() or "IPKernelApp" in getattr(shell, "config", ())):  # a notebook's kernel
        lines = {"delay": SECONDS_OF_A_LINE, "mininterval": SECONDS_OF_A_LINE, "bar_format": LINE}
        options |= {**lines, "maxinterval": SECONDS_OF_A_LINE, "ascii": True, "file": _Lines()}
    return tqdm(items, leave=False, **options)


class _Lines:
    """A stream that turns a bar's redrawn states into lines of stderr."""

    def write(self, text: str) -> None:
        if text := text.strip("\r\n "):
            sys.stderr.write(f"{text}\n")

    def flush(self) -> None:
        sys.stderr.flush()
