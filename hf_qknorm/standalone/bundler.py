"""Bundle definitions of the package, and every definition that they need, into the text of one Python file."""

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
LINE_LENGTH = 120

Name = tuple[str, str]  # a module, and a name defined at its top level
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
Import = tuple[str, str | None]  # a module, and the name imported from it; None: the module itself
Edit = tuple[int, int, int, str]  # line, first and last byte, and the replacement


class Module:
    """A parsed module of the package: its definitions and imports, by name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines = _file(name).read_text(encoding="utf-8").splitlines()
        self.definitions: dict[str, Definition] = {}
        self.imports: dict[str, Import] = {}
        for statement in _statements(ast.parse("\n".join(self.lines))):
            if isinstance(statement, ast.Import):
                self.imports |= {alias.asname or alias.name: (alias.name, None) for alias in statement.names}
            elif isinstance(statement, ast.ImportFrom) and statement.module not in (None, "__future__"):
                source = str(statement.module)
                self.imports |= {alias.asname or alias.name: (source, alias.name) for alias in statement.names}
            elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
                self.definitions[statement.name] = statement
            elif isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                self.definitions |= {target.id: statement for target in targets if isinstance(target, ast.Name)}

    @cached_property
    def package_imports(self) -> list[str]:
        """The modules of the package that this module imports, in order."""
        own = [(module, name) for module, name in self.imports.values() if module.partition(".")[0] == PACKAGE]
        return [f"{module}.{name}" if name and _is_module(f"{module}.{name}") else module for module, name in own]


@dataclass
class Bundle:
    """The definitions that `roots` need.

    `replaced` maps names to the names that are bundled in their place. `entries` limits a literal dict to some keys.

    Raises ValueError for sources that can't be bundled: a function that imports the package, or a module used as a
    value.
    """

    roots: tuple[Name, ...]
    replaced: Mapping[Name, Name] = field(default_factory=dict)
    entries: Mapping[Name, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._modules: dict[str, Module] = {}
        self._names: dict[Name, None] = {}
        self._imports: dict[str, Import] = {}  # of other packages
        waiting = [self._resolve(root) for root in self.roots]
        while waiting:
            name = waiting.pop()
            if name not in self._names:
                self._names[name] = None
                waiting += [target for _, target in self._references(name)]

    def text(self) -> str:
        """Return the imports, and the definitions, each after those that it needs when it runs."""
        text = self._import_lines()
        written: set[int] = set()  # one statement may define several names
        after_assignment = False  # no blank lines between assignments
        for module in self._ordered_modules():
            heading = f"# From {_file(module).relative_to(ROOT.parent).as_posix()}\n"
            names = [name for name in self._names if name[0] == module]
            for name in sorted(names, key=lambda name: self._definition(name).lineno):
                definition = self._definition(name)
                if id(definition) in written:
                    continue
                written.add(id(definition))
                is_assignment = isinstance(definition, ast.Assign | ast.AnnAssign)
                adjacent = after_assignment and is_assignment and not heading
                text += ("\n" if adjacent else "\n\n\n") + heading + self._source(name)
                heading, after_assignment = "", is_assignment
        return text + "\n"

    def bundled_name(self, name: Name) -> str:
        """Return a definition's name in the bundle, which begins with its module's name if two would be equal."""
        others = [other for other in self._names if other[1] == name[1] and other != name]
        return f"{name[0].rpartition('.')[2]}_{name[1].strip('_')}" if others else name[1]

    def _module(self, name: str) -> Module:
        if name not in self._modules:
            self._modules[name] = Module(name)
        return self._modules[name]

    def _definition(self, name: Name) -> Definition:
        return self._module(name[0]).definitions[name[1]]

    def _resolve(self, name: Name) -> Name:
        """Follow imports to the module that defines the name, or to the name's replacement."""
        if name in self.replaced:
            return self.replaced[name]
        module = self._module(name[0])
        if name[1] in module.definitions:
            return name
        source, attribute = module.imports[name[1]]
        return self._resolve((source, str(attribute)))

    def _references(self, name: Name) -> Iterator[tuple[Edit, Name]]:
        """Yield each reference to the package within a definition, with the position of the reference as an edit."""
        module = self._module(name[0])
        for node in _kept_nodes(self._definition(name), self.entries.get(name)):
            for reference in _free_names(node):
                target = self._target(module, reference)
                if target is not None:
                    expression, referenced = target
                    end: Any = expression.end_col_offset
                    yield (expression.lineno, expression.col_offset, end, ast.unparse(expression)), referenced

    def _target(self, module: Module, reference: ast.Name | ast.Attribute) -> tuple[ast.expr, Name] | None:
        """Return the expression that refers to a definition of the package, and that definition.

        The expression is all of `functions.attend`, and `Scheme` of `Scheme.of`. Imports of other packages are noted.
        """
        name = reference.value if isinstance(reference, ast.Attribute) else reference
        if not isinstance(name, ast.Name):
            return None
        if name.id in module.definitions:
            return name, self._resolve((module.name, name.id))
        if name.id not in module.imports:
            return None
        source, attribute = module.imports[name.id]
        if source.partition(".")[0] != PACKAGE:
            self._imports[name.id] = source, attribute
            return None
        inner = f"{source}.{attribute}"
        if not _is_module(inner):
            return name, self._resolve((source, str(attribute)))
        if isinstance(reference, ast.Name):
            raise ValueError(
                f"{module.name}, line {reference.lineno}: the module {name.id} is used as a value, which can't be "
                "bundled: use its attributes"
            )
        return reference, self._resolve((inner, reference.attr))

    def _source(self, name: Name) -> str:
        """Return a definition's text and the comment above it, with references under their names in the bundle."""
        references = ((edit, self.bundled_name(target)) for edit, target in self._references(name))
        edits = [(line, first, last, new) for (line, first, last, old), new in references if new != old]
        lines, definition, keys = self._module(name[0]).lines, self._definition(name), self.entries.get(name)
        if keys is not None:
            head, *parts = (_edited_source(lines, part, edits) for part in _kept_nodes(definition, keys))
            entries = "".join(f"    {key}: {value},\n" for key, value in zip(parts[::2], parts[1::2], strict=True))
            return f"{name[1]}: {head} = {{\n{entries}}}"
        text = _edited_source(lines, definition, edits)
        word = {ast.ClassDef: "class ", ast.FunctionDef: "def "}.get(type(definition), "")
        text = text.replace(f"{word}{name[1]}", f"{word}{self.bundled_name(name)}", 1)
        first = comment = _first_line(definition) - 1
        while comment and lines[comment - 1].startswith("#"):
            comment -= 1
        return "\n".join([*lines[comment:first], text])

    def _ordered_modules(self) -> list[str]:
        """Return the modules of the bundled definitions, each after the modules that it imports."""
        order: dict[str, None] = {}

        def visit(module: str, above: tuple[str, ...] = ()) -> None:
            if module not in order and module not in above:
                for other in self._module(module).package_imports:
                    visit(other, (*above, module))
                order[module] = None

        used = {module: None for module, _ in self._names}
        for module in used:
            visit(module)
        return [module for module in order if module in used]

    def _import_lines(self) -> str:
        plain = sorted(f"import {source}" for source, name in self._imports.values() if name is None)
        named: dict[str, list[str]] = {}
        for local, (source, name) in sorted(self._imports.items()):
            if name is not None:
                named.setdefault(source, []).append(name if name == local else f"{name} as {local}")
        lines = [*plain, *(_import_line(source, sorted(named[source], key=_import_rank)) for source in sorted(named))]
        standard = [line for line in lines if line.split()[1].partition(".")[0] in sys.stdlib_module_names]
        others = [line for line in lines if line not in standard]
        return "\n".join(["from __future__ import annotations", "", *standard, "", *others])


def _file(module: str) -> Path:
    path = ROOT.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _is_module(name: str) -> bool:
    return _file(name).is_file()


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield a module's statements; for `if TYPE_CHECKING` those of its `else`."""
    for statement in tree.body:
        yield from statement.orelse if isinstance(statement, ast.If) else [statement]


def _first_line(definition: Any) -> int:
    """Return the number of a definition's first line, decorators included."""
    return min([definition.lineno, *(decorator.lineno for decorator in getattr(definition, "decorator_list", []))])


def _kept_nodes(definition: Definition, keys: tuple[str, ...] | None) -> list[ast.AST]:
    """Return the definition itself, or the annotation, keys and values that are kept of a literal dict."""
    if keys is None:
        return [definition]
    if not isinstance(definition, ast.AnnAssign) or not isinstance(definition.value, ast.Dict):
        raise ValueError(f"line {definition.lineno}: expected an annotated literal dict with the keys {keys}")
    items = zip(definition.value.keys, definition.value.values, strict=True)
    table = {name.value: [name, value] for name, value in items if isinstance(name, ast.Constant)}
    if missing := [key for key in keys if key not in table]:
        raise ValueError(f"line {definition.lineno}: the table has no key {missing[0]!r}")
    return [definition.annotation, *(part for key in keys for part in table[key])]


def _free_names(node: ast.AST, bound: frozenset[str] = frozenset()) -> Iterator[ast.Name | ast.Attribute]:
    """Yield names, and attributes of names, that `node` reads and no enclosing function binds."""
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        inner = [n for child in ast.iter_child_nodes(node) for n in ast.walk(child)]
        bound |= {n.arg for n in inner if isinstance(n, ast.arg)}
        bound |= {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == PACKAGE:
        raise ValueError(f"line {node.lineno}: a function imports the package, which can't be bundled")
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id not in bound:
            yield node
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in bound:
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _free_names(child, bound)


def _edited_source(lines: list[str], node: Any, edits: list[Edit]) -> str:
    """Return the text of a node, with the edits that fall within it."""
    start = _first_line(node)
    source = [line.encode() for line in lines[start - 1 : node.end_lineno]]  # positions count bytes
    source[-1] = source[-1][: node.end_col_offset]
    whole = isinstance(node, ast.stmt)
    for line, first, last, text in sorted(edits, reverse=True):
        inside = start <= line <= node.end_lineno and (whole or first >= node.col_offset)
        if inside and (line < node.end_lineno or last <= node.end_col_offset):
            row = source[line - start]
            source[line - start] = row[:first] + text.encode() + row[last:]
    if not whole:
        source[0] = source[0][node.col_offset :]
    return textwrap.dedent(b"\n".join(source).decode())


def _import_rank(name: str) -> tuple[int, str]:
    """The sort key of a name in an import: constants, then classes, then functions and modules."""
    return 0 if name.isupper() else 1 if name[0].isupper() else 2, name.lower()


def _import_line(source: str, names: list[str]) -> str:
    line = f"from {source} import {', '.join(names)}"
    if len(line) <= LINE_LENGTH:
        return line
    return "\n".join([f"from {source} import (", *(f"    {name}," for name in names), ")"])
