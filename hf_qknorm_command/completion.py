"""Completion scripts for shells, by shtab."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any, Final, NoReturn

from hf_qknorm_command.values import parse_knee, parse_method, parse_preset, parse_scheme

FOLDERS: Final = ("CKPT", "SRC", "DST", "FOLDER")  # the placeholders of arguments that are folders
FILES: Final = ("TEXT", "LOG", "PNG")


class PrintCompletion(argparse.Action):
    """Print the script that completes the command's arguments in a shell, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, shell: Any, _: str | None = None) -> NoReturn:
        try:
            import shtab
        except ImportError as error:
            raise ImportError(f"--print-completion needs shtab: pip install shtab ({error})") from None
        if shell not in shtab.SUPPORTED_SHELLS:
            shells = ", ".join(shtab.SUPPORTED_SHELLS)
            raise argparse.ArgumentError(self, f"invalid choice: {shell!r} (choose from {shells})")
        choices = _choices()
        for action in _arguments(parser):
            action.choices = choices.get(action.type, action.choices)
            if action.metavar in FOLDERS:
                action.complete = shtab.DIRECTORY
            elif action.metavar in FILES:
                action.complete = shtab.FILE
            elif action is self:
                action.choices = shtab.SUPPORTED_SHELLS
        sys.stdout.write(f"{shtab.complete(parser, shell)}\n")
        parser.exit()


def _arguments(parser: argparse.ArgumentParser) -> Iterator[Any]:
    """Yield the arguments of a parser and of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _arguments(command)
        else:
            yield action


def _choices() -> dict[Any, list[str]]:
    """The values of arguments by the function that parses them; the package, whose import takes seconds, has them."""
    from hf_qknorm.calibration.options import METHODS
    from hf_qknorm.scheme import SCHEMES

    presets = list(SCHEMES)
    return {
        parse_preset: [name for name in presets if name != "none"],
        parse_scheme: presets,
        parse_method: list(METHODS),
        parse_knee: ["auto"],
    }
