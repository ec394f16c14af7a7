"""One file of Python out of the package's own sources: the definitions that some names need, and nothing else."""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

PACKAGE = __name__.partition(".")[0]
ROOT = Path(__file__).parents[1]
LINE = 120

Name = tuple[str, str]  # a module, and what it defines at its top level
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
External = tuple[str, str | None]  # a module of others, and what is imported from it; None: itself
Edit = tuple[int, int, int, str]  # line, first and last byte, and the text that takes their place


class Module:
    """A module of the package, parsed: what it defines, and what its imports stand for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines = _file(name).read_text(encoding="utf-8").splitlines()
        self.definitions: dict[str, Definition] = {}
        self.imports: dict[str, tuple[str, str | None]] = {}
        for statement in _statements(ast.parse("\n".join(self.lines))):
            self._enter(statement)

    def _enter(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                self.imports[alias.asname or alias.name] = (alias.name, None)
        elif isinstance(statement, ast.ImportFrom) and statement.module not in (None, "__future__"):
            for alias in statement.names:
                self.imports[alias.asname or alias.name] = (str(statement.module), alias.name)
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            self.definitions[statement.name] = statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            self.definitions |= {target.id: statement for target in targets if isinstance(target, ast.Name)}

    @cached_property
    def package_modules(self) -> list[str]:
        """The package's modules that it imports, in order."""
        ours = [(m, n) for m, n in self.imports.values() if m.partition(".")[0] == PACKAGE]
        return [f"{m}.{n}" if n and _is_module(f"{m}.{n}") else m for m, n in ours]


@dataclass
class Bundle:
    """What `roots` need, gathered. `replaced` gives names others in their place; `entries` keeps, of a literal table,
    some keys alone.

    Raises ValueError for sources that can't be gathered: an import of the package inside a function.
    """

    roots: tuple[Name, ...]
    replaced: Mapping[Name, Name] = field(default_factory=dict)
    entries: Mapping[Name, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._modules: dict[str, Module] = {}
        self._found: dict[Name, None] = {}
        self._external: dict[str, External] = {}
        waiting = [self._final(root) for root in self.roots]
        while waiting:
            name = waiting.pop()
            if name not in self._found:
                self._found[name] = None
                waiting += [target for _, target in self._references(name)]

    def text(self) -> str:
        """The imports, and the definitions in an order in which they can be run."""
        text = self._imports()
        written: set[int] = set()  # one statement may define several names
        simple = False  # assignments stand together
        for module in self._ordered():
            heading = f"# From {_file(module).relative_to(ROOT.parent).as_posix()}\n"
            names = [name for name in self._found if name[0] == module]
            for name in sorted(names, key=lambda name: self._definition(name).lineno):
                definition = self._definition(name)
                if id(definition) in written:
                    continue
                written.add(id(definition))
                together = simple and not heading and isinstance(definition, ast.Assign | ast.AnnAssign)
                text += ("\n" if together else "\n\n\n") + heading + self._source(name)
                heading, simple = "", isinstance(definition, ast.Assign | ast.AnnAssign)
        return text + "\n"

    def name_of(self, name: Name) -> str:
        """What a definition is called in the bundle: its own name, or its module's and its own where two have it."""
        others = [other for other in self._found if other[1] == name[1] and other != name]
        return f"{name[0].rpartition('.')[2]}_{name[1].strip('_')}" if others else name[1]

    def _module(self, name: str) -> Module:
        if name not in self._modules:
            self._modules[name] = Module(name)
        return self._modules[name]

    def _definition(self, name: Name) -> Definition:
        return self._module(name[0]).definitions[name[1]]

    def _final(self, name: Name) -> Name:
        """The name that stands for this one: where it is defined, or what replaces it."""
        if name in self.replaced:
            return self.replaced[name]
        module = self._module(name[0])
        if name[1] in module.definitions:
            return name
        return self._final((module.imports[name[1]][0], str(module.imports[name[1]][1])))

    def _references(self, name: Name) -> Iterator[tuple[Edit, Name]]:
        """Every mention of something of the package within a definition, and the edit that renames it."""
        module = self._module(name[0])
        for node in _parts(self._definition(name), self.entries.get(name)):
            for found in _mentions(node):
                target = self._target(module, found)
                if target is not None:
                    last: Any = target[0].end_col_offset
                    yield (target[0].lineno, target[0].col_offset, last, ast.unparse(target[0])), target[1]

    def _target(self, module: Module, found: ast.Name | ast.Attribute) -> tuple[ast.expr, Name] | None:
        """What a mention names of the package, and the expression that does: `functions.attend`, or `Scheme` of
        `Scheme.of`. Notes what it names of others.
        """
        name = found.value if isinstance(found, ast.Attribute) else found
        if not isinstance(name, ast.Name):
            return None
        if name.id in module.definitions:
            return name, self._final((module.name, name.id))
        if name.id not in module.imports:
            return None
        source, attribute = module.imports[name.id]
        if source.partition(".")[0] != PACKAGE:
            self._external[name.id] = source, attribute
            return None
        inner = f"{source}.{attribute}"
        if not _is_module(inner):
            return name, self._final((source, str(attribute)))
        if isinstance(found, ast.Name):
            raise ValueError(
                f"{module.name}, line {found.lineno}: {found.id} is used as a value, and a module can't be"
            )
        return found, self._final((inner, found.attr))

    def _source(self, name: Name) -> str:
        """A definition's text, with its comment, and with what it mentions under the names of the bundle."""
        edits = []
        for (line, first, last, now), target in self._references(name):
            if now != self.name_of(target):
                edits.append((line, first, last, self.name_of(target)))
        lines, definition, keys = self._module(name[0]).lines, self._definition(name), self.entries.get(name)
        if keys is not None:
            head, *parts = (_cut(lines, part, edits) for part in _parts(definition, keys))
            entries = "".join(f"    {key}: {value},\n" for key, value in zip(parts[::2], parts[1::2], strict=True))
            return f"{name[1]}: {head} = {{\n{entries}}}"
        text = _cut(lines, definition, edits)
        renamed = self.name_of(name)
        if renamed != name[1] and isinstance(definition, ast.FunctionDef | ast.ClassDef):
            word = "class" if isinstance(definition, ast.ClassDef) else "def"
            text = text.replace(f"{word} {name[1]}", f"{word} {renamed}", 1)
        elif renamed != name[1]:
            text = renamed + text.removeprefix(name[1])
        first = min([definition.lineno, *(d.lineno for d in getattr(definition, "decorator_list", []))]) - 1
        comment = first
        while comment and lines[comment - 1].startswith("#"):
            comment -= 1
        return "\n".join([*lines[comment:first], text])

    def _ordered(self) -> list[str]:
        """The modules, each after those that it imports."""
        order: dict[str, None] = {}

        def visit(module: str, above: tuple[str, ...] = ()) -> None:
            if module not in order and module not in above:
                for other in self._module(module).package_modules:
                    visit(other, (*above, module))
                order[module] = None

        for module, _ in self._found:
            visit(module)
        used = {module for module, _ in self._found}
        return [module for module in order if module in used]

    def _imports(self) -> str:
        plain = sorted(f"import {source}" for source, name in self._external.values() if name is None)
        named: dict[str, list[str]] = {}
        for local, (source, name) in sorted(self._external.items()):
            if name is not None:
                named.setdefault(source, []).append(name if name == local else f"{name} as {local}")
        lines = plain + [_import_line(source, sorted(names, key=_rank)) for source, names in sorted(named.items())]
        standard = [line for line in lines if line.split()[1].partition(".")[0] in sys.stdlib_module_names]
        others = [line for line in lines if line not in standard]
        return "\n".join(["from __future__ import annotations", "", *standard, "", *others])


def _file(module: str) -> Path:
    path = ROOT.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _is_module(name: str) -> bool:
    return _file(name).is_file()


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a module; of `if TYPE_CHECKING`, what runs."""
    for statement in tree.body:
        if isinstance(statement, ast.If):
            yield from statement.orelse
        else:
            yield statement


def _parts(definition: Definition, keys: tuple[str, ...] | None) -> list[ast.AST]:
    """A definition; of a literal table of which some keys are wanted: annotation, and each key and its value."""
    if keys is None:
        return [definition]
    if not isinstance(definition, ast.AnnAssign) or not isinstance(definition.value, ast.Dict):
        raise ValueError(f"line {definition.lineno}: expected an annotated literal dict with the keys {keys}")
    items = zip(definition.value.keys, definition.value.values, strict=True)
    table = {name.value: [name, value] for name, value in items if isinstance(name, ast.Constant)}
    if missing := [key for key in keys if key not in table]:
        raise ValueError(f"line {definition.lineno}: the table has no key {missing[0]!r}")
    return [definition.annotation, *(part for key in keys for part in table[key])]


def _mentions(node: ast.AST, hidden: frozenset[str] = frozenset()) -> Iterator[ast.Name | ast.Attribute]:
    """Names, and attributes of names, that are read in `node` and that no function around binds for itself."""
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        inner = [n for child in ast.iter_child_nodes(node) for n in ast.walk(child)]
        bound = {n.arg for n in inner if isinstance(n, ast.arg)}
        hidden |= bound | {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == PACKAGE:
        raise ValueError(f"line {node.lineno}: the package is imported inside a function, which can't travel")
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id not in hidden:
            yield node
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in hidden:
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _mentions(child, hidden)


def _cut(lines: list[str], node: ast.AST, edits: list[Edit]) -> str:
    """The text of a node, with the edits that fall within it."""
    start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])  # type: ignore[attr-defined]
    end: int = node.end_lineno  # type: ignore[attr-defined]
    cut = [line.encode() for line in lines[start - 1 : end]]  # positions count bytes
    cut[-1] = cut[-1][: node.end_col_offset]  # type: ignore[attr-defined]
    whole = isinstance(node, ast.stmt)
    for line, first, last, text in sorted(edits, reverse=True):
        inside = start <= line <= end and (whole or first >= node.col_offset)  # type: ignore[attr-defined]
        if inside and (line < end or last <= node.end_col_offset):  # type: ignore[attr-defined]
            row = cut[line - start]
            cut[line - start] = row[:first] + text.encode() + row[last:]
    if not whole:
        cut[0] = cut[0][node.col_offset :]  # type: ignore[attr-defined]
    return textwrap.dedent(b"\n".join(cut).decode())


def _rank(name: str) -> tuple[int, str]:
    """Where a name stands in an import: constants, then classes, then the rest."""
    return 0 if name.isupper() else 1 if name[0].isupper() else 2, name.lower()


def _import_line(source: str, names: list[str]) -> str:
    line = f"from {source} import {', '.join(names)}"
    if len(line) <= LINE:
        return line
    return "\n".join([f"from {source} import (", *(f"    {name}," for name in names), ")"])
