"""How a hook is installed: at the end of the import of a module, and around one of its functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from inspect import getattr_static
from types import ModuleType
from typing import Any, Final


def after_import(module: str, action: Callable[[Any], None]) -> None:
    """Call `action` with a module after each import of it, and now if it is imported."""
    actions = _FINDER.actions.setdefault(module, [])
    if action not in actions:
        actions.append(action)
    if module in sys.modules:
        action(sys.modules[module])
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def wrap(owner: Any, path: str, around: Callable[..., Any]) -> None:
    """Let `around(function, *args, **kwargs)` take the place of the function at a path such as "Class.method", once.

    Nothing happens in a version of the library without that class or function.
    """
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    held = getattr_static(owner, name, None)  # a classmethod or staticmethod holds its function
    function = getattr(held, "__func__", held)
    if function is None or getattr(function, "hf_qknorm_hook", None) is around:
        return

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(function, *args, **kwargs)

    vars(wrapped)["hf_qknorm_hook"] = around
    setattr(owner, name, wrapped if held is function else type(held)(wrapped))


class _Finder(MetaPathFinder):
    """Finds the modules that have actions as Python does, and calls these after each import."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Callable[[Any], None]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self.actions else None
        if spec is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for action in self.actions[fullname]:
                    action(module)

            loader.exec_module = exec_module
        return spec


_FINDER: Final = _Finder()
