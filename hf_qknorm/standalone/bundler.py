"""Bundle definitions of the package, and every definition that they need, into the text of one Python file."""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

PACKAGE = __name__.partition(".")[0]
ROOT = Path(__file__).parents[1]

Name = tuple[str, str]  # a module, and a name defined at its top level
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
Import = tuple[str, str | None]  # a module, and the name imported from it; None: the module itself


class Module:
    """A parsed module of the package: its definitions and imports, by name."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self.name, self.lines = name, lines
        self.definitions: dict[str, Definition] = {}
        self.imports: dict[str, Import] = {}
        parsed = ast.parse("\n".join(lines)).body
        for statement in chain(*(x.orelse if isinstance(x, ast.If) else [x] for x in parsed)):  # not `if TYPE_CHECKING`
            if isinstance(statement, ast.Import):
                self.imports |= {alias.asname or alias.name: (alias.name, None) for alias in statement.names}
            elif isinstance(statement, ast.ImportFrom) and (source := statement.module) not in (None, "__future__"):
                self.imports |= {alias.asname or alias.name: (str(source), alias.name) for alias in statement.names}
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
    replaced: Mapping[Name, Name]
    entries: Mapping[Name, tuple[str, ...]]

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
        """Return the imports, and the definitions, each after the definitions that it needs when it runs."""
        text = self._import_lines()
        after_assignment = False  # no blank lines between assignments
        for module in self._ordered_modules():
            heading = f"# From {_file(module).relative_to(ROOT.parent).as_posix()}\n"
            by_line = {self._definition(name).lineno: name for name in self._names if name[0] == module}
            for _, name in sorted(by_line.items()):  # one statement may define several names
                is_assignment = isinstance(self._definition(name), ast.Assign | ast.AnnAssign)
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
            module = Module(name, _file(name).read_text(encoding="utf-8").splitlines())
            for table, keys in self.entries.items():
                module = Module(name, _limited(module, table[1], keys)) if table[0] == name else module
            self._modules[name] = module
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

    def _references(self, name: Name) -> Iterator[tuple[ast.expr, Name]]:
        """Yield each expression within a definition that refers to the package, and the definition that it means."""
        for reference in _free_names(self._definition(name)):
            if target := self._target(self._module(name[0]), reference):
                yield target

    def _target(self, module: Module, reference: ast.Name | ast.Attribute) -> tuple[ast.expr, Name] | None:
        """Return the expression that refers to a definition of the package, and that definition.

        The expression is all of `library.attention`, and `Scheme` of `Scheme.of`. Imports of other packages are noted.
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
        lines, definition = self._module(name[0]).lines, self._definition(name)
        first = comment = min(x.lineno for x in (definition, *getattr(definition, "decorator_list", []))) - 1
        source = [line.encode() for line in lines[first : definition.end_lineno]]  # positions count bytes
        source[-1] = source[-1][: definition.end_col_offset]
        references = {(node.lineno, node.col_offset): (node, target) for node, target in self._references(name)}
        for (line, column), (node, target) in sorted(references.items(), reverse=True):
            row = source[line - 1 - first]
            source[line - 1 - first] = row[:column] + self.bundled_name(target).encode() + row[node.end_col_offset :]
        text = textwrap.dedent(b"\n".join(source).decode())
        word = {ast.ClassDef: "class ", ast.FunctionDef: "def "}.get(type(definition), "")
        text = text.replace(f"{word}{name[1]}", f"{word}{self.bundled_name(name)}", 1)
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
        """Return the imports of other packages, a line for each name, those of Python itself first."""
        lines = []
        for local, (source, name) in self._imports.items():
            renamed = "" if local in (source, name) else f" as {local}"
            lines.append(f"import {source}{renamed}" if name is None else f"from {source} import {name}{renamed}")
        lines.sort(key=lambda line: (line.startswith("from"), line))
        standard = [line for line in lines if line.split()[1].partition(".")[0] in sys.stdlib_module_names]
        others = [line for line in lines if line not in standard]
        return "\n".join(["from __future__ import annotations", "", *standard, "", *others])


def _file(module: str) -> Path:
    path = ROOT.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _is_module(name: str) -> bool:
    return _file(name).is_file()


def _limited(module: Module, table: str, keys: tuple[str, ...]) -> list[str]:
    """Return a module's lines without the other entries of a literal dict."""
    items: Any = getattr(module.definitions[table], "value", None)
    if not isinstance(items, ast.Dict):
        raise ValueError(f"{module.name}: {table} is no literal dict, expected one with the keys {keys}")
    pairs: Any = zip(items.keys, items.values, strict=True)
    entries = {ast.literal_eval(key): range(key.lineno, value.end_lineno + 1) for key, value in pairs}
    if missing := [key for key in keys if key not in entries]:
        raise ValueError(f"{module.name}: the table {table} has no key {missing[0]!r}")
    removed = {line for key, lines in entries.items() if key not in keys for line in lines}
    return [line for number, line in enumerate(module.lines, 1) if number not in removed]


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
