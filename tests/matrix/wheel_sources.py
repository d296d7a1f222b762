"""The sources of a vLLM wheel as syntax trees: names, members and parameters, without importing anything."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path


def release(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


class Wheel:
    """Modules, classes and members of one wheel, by name."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self._names = set(self._zip.namelist())
        metadata = next(name for name in self._names if name.endswith(".dist-info/METADATA"))
        found = re.search(r"^Version: (\S+)", self._zip.read(metadata).decode(), re.MULTILINE)
        assert found is not None, f"{metadata} names no version"
        self.version = found[1]
        self.release = release(self.version)

    @cache  # noqa: B019 - one wheel a process
    def module(self, name: str) -> ast.Module | None:
        stem = name.replace(".", "/")
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if path in self._names:
                return ast.parse(self._zip.read(path))
        return None

    def find(self, module: str, name: str, depth: int = 0) -> tuple[str, ast.AST] | None:
        """The definition of a module's name and the module it really stands in."""
        tree = self.module(module)
        if tree is None or depth > 8:
            return None
        found = None
        for node in walk_top(tree.body):
            if name in names_of(node):
                found = (module, node)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        found = self.find(self._absolute(module, node), alias.name, depth + 1) or found
        return found

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module.split(".")
        if f"{'/'.join(package)}/__init__.py" not in self._names:
            package = package[:-1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])

    def lineage(self, module: str, name: str) -> list[tuple[str, ast.ClassDef]]:
        """The class and its bases inside the wheel, nearest first."""
        found = self.find(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return []
        where, node = found
        out = [(where, node)]
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name):
                out += self.lineage(where, base.id)
        return out

    def members(self, module: str, name: str) -> dict[str, ast.AST]:
        """Methods, fields, constants and attributes set on self, inherited ones included."""
        out: dict[str, ast.AST] = {}
        for _, node in self.lineage(module, name):
            for member, value in own_members(node):
                out.setdefault(member, value)
        return out


def walk_top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class, also those under if and try."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.ExceptHandler)):
                yield from walk_top(getattr(node, part, []))


def names_of(node: ast.AST) -> set[str]:
    """What a statement defines: a class, a function, variables, attributes of self."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return set()
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names: set[str] = set()
    for target in targets:
        for part in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(part, ast.Name):
                names.add(part.id)
            elif isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                names.add(part.attr)
    return names


def own_members(node: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    for item in walk_top(node.body):
        yield from ((name, item) for name in names_of(item))
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ast.walk(item):
                if isinstance(inner, ast.Assign | ast.AnnAssign):
                    yield from ((name, inner) for name in names_of(inner))


# ---- parameters


@dataclass
class Signature:
    """Parameters without self: name and whether it has a default; ``rest`` is for *, ``keywords`` for **."""

    positional: list[tuple[str, bool]] = field(default_factory=list)
    keyword: list[tuple[str, bool]] = field(default_factory=list)
    rest: bool = False
    keywords: bool = False

    @classmethod
    def of(cls, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Signature:
        a = node.args
        names = [arg.arg for arg in (*a.posonlyargs, *a.args)]
        with_default = len(names) - len(a.defaults)
        positional = [(name, i >= with_default) for i, name in enumerate(names)]
        static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
        keyword = [
            (arg.arg, default is not None) for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)
        ]
        return cls(
            positional if static else positional[1:], keyword, a.vararg is not None, a.kwarg is not None
        )

    def objection(self, base: Signature) -> str | None:
        """Why this method cannot stand for ``base``; None if it can."""
        for i, (name, _) in enumerate(base.positional):
            if i < len(self.positional):
                if self.positional[i][0] != name:
                    return f"parameter {i + 1} is {name!r} there, {self.positional[i][0]!r} here"
            elif not self.rest:
                return f"new parameter {name!r}"
        known = {name for name, _ in (*self.positional, *self.keyword)}
        for name, _ in base.keyword:
            if name not in known and not self.keywords:
                return f"new keyword parameter {name!r}"
        if base.keywords and not self.keywords:
            return "takes **kwargs there"
        extra = self.positional[len(base.positional) :]
        theirs = {name for name, _ in (*base.positional, *base.keyword)}
        needed = [name for name, default in (*extra, *self.keyword) if not default and name not in theirs]
        return f"parameter {needed[0]!r} is not given there" if needed else None


def constructor(wheel: Wheel, module: str, name: str) -> Signature | None:
    """Of a class: its __init__, or its fields in order if it is a dataclass or named tuple."""
    lineage = wheel.lineage(module, name)
    if not lineage:
        return None
    for _, node in lineage:
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                return Signature.of(item)
    fields: dict[str, bool] = {}
    for _, node in reversed(lineage):
        fields.update(item for item in map(field_of, node.body) if item is not None)
    return Signature(list(fields.items()))


def field_of(item: ast.stmt) -> tuple[str, bool] | None:
    """Name of a dataclass field that the constructor takes, and whether it has a default."""
    if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
        return None
    if "ClassVar" in ast.unparse(item.annotation):
        return None
    if not isinstance(item.value, ast.Call) or ast.unparse(item.value.func) != "field":
        return item.target.id, item.value is not None
    options = {option.arg: ast.unparse(option.value) for option in item.value.keywords}
    if options.get("init") == "False":
        return None
    return item.target.id, bool({"default", "default_factory"} & options.keys())
