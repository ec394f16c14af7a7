"""Progress bars: in terminals and in notebooks, and none where the output goes to a file or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm  # a widget in notebooks with ipywidgets, else text


def progress_bar(items: Iterable[Any] | None = None, *, hidden: bool = False, **options: Any) -> Any:
    """A tqdm bar that is removed at its end. `options` are tqdm's; TQDM_DISABLE=1 in the environment hides it too."""
    if hidden or not (_on_terminal() or _in_notebook()):
        options["disable"] = True
    return tqdm(items, leave=False, **options)


def _in_notebook() -> bool:
    """Whether the process is the kernel of a notebook, whose streams are no terminals."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()  # None under pythonw
