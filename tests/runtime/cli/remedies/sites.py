"""The refusals in `src`, read from the syntax trees: their place, message and remedy.

A refusal is a call of a `UserError`, or of a function that gets the remedy as a parameter. Its
texts are literal parts; a value that is filled in is `…`. Names are followed to assignments and
constants, calls to what the function returns.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product

from tests.support.ranks import ROOT

SOURCES = ROOT / "src"
VALUE = "…"
MAX_DEPTH = 5  # names and calls that are followed
UNKNOWN_NAME = ["kind", "what", "name", "choices", "where"]  # parameters in holdfast/errors.py
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Refusal:
    module: str  # below src, with its line
    function: str
    message: frozenset[str]
    where: frozenset[str] | None  # None: no place
    remedy: frozenset[str] | None  # None: no remedy


@dataclass(frozen=True)
class Source:
    """What a module defines at its top: constants, functions, and where its imports come from."""

    tree: ast.Module
    constants: dict[str, list[ast.expr]] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> Source:
        source = cls(ast.parse(text))
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                path = f"{node.module.replace('.', '/')}.py"
                source.imports.update({a.asname or a.name: path for a in node.names})
            elif isinstance(node, Function):
                source.functions[node.name] = node
        source.constants.update(_assignments(source.tree.body))
        return source


@cache
def _source(module: str) -> Source | None:
    path = SOURCES / module
    return Source.read(path.read_text("utf-8")) if path.is_file() else None


def _assignments(nodes: Iterable[ast.AST]) -> dict[str, list[ast.expr]]:
    values: dict[str, list[ast.expr]] = {}
    for node in nodes:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            targets = [node.target]
        for target in targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            same = isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(names)
            for place, name in enumerate(names):
                if isinstance(name, ast.Name) and node.value is not None:
                    value = node.value.elts[place] if same else node.value
                    values.setdefault(name.id, []).append(value)
    return values


def texts_of(node: ast.expr | None, source: Source, function: Function, depth: int = 0) -> set[str]:
    """Return the alternatives of an expression's literal text."""

    def inner(one: ast.expr | None, more: int = 0) -> set[str]:
        return texts_of(one, source, function, depth + more)

    if isinstance(node, ast.Constant):
        return {str(node.value) if node.value is not None else ""}
    if isinstance(node, ast.FormattedValue):
        return inner(node.value, 1) if isinstance(node.value, ast.Name) else {VALUE}
    if isinstance(node, ast.JoinedStr):
        return _joined([inner(value) for value in node.values])
    if isinstance(node, ast.BinOp):
        return _joined([inner(node.left), inner(node.right)])
    if isinstance(node, ast.IfExp):
        return inner(node.body) | inner(node.orelse)
    if isinstance(node, ast.BoolOp):
        return set().union(*map(inner, node.values))
    if isinstance(node, ast.Name | ast.Call) and depth < MAX_DEPTH:
        return _followed(node, source, function, depth + 1) or {VALUE}
    return {VALUE}


def _joined(parts: list[set[str]]) -> set[str]:
    few = [sorted(part) if len(part) < 9 else [VALUE] for part in parts]
    return {"".join(words) for words in product(*few)}


def _followed(
    node: ast.Name | ast.Call, source: Source, function: Function, depth: int
) -> set[str]:
    name = node.id if isinstance(node, ast.Name) else called(node)
    if isinstance(node, ast.Name):
        values = _assignments(ast.walk(function)).get(name) or source.constants.get(name, [])
        if values:
            return set().union(*(texts_of(v, source, function, depth) for v in values))
    elif name in source.functions:
        callee = source.functions[name]
        returns = [n.value for n in ast.walk(callee) if isinstance(n, ast.Return)]
        return set().union(*(texts_of(value, source, callee, depth) for value in returns))
    other = _source(source.imports[name]) if name in source.imports else None
    if other is None or (name not in other.functions and name not in other.constants):
        return set()
    return _followed(node, other, function, depth)


def called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)


def calls_of(tree: ast.AST) -> Iterator[tuple[ast.Call, Function]]:
    """Every call, and the function that it stands in."""
    waiting: list[tuple[ast.AST, Function | None]] = [(tree, None)]
    while waiting:
        node, inside = waiting.pop()
        if isinstance(node, Function):
            inside = node
        elif isinstance(node, ast.Call) and inside is not None:
            yield node, inside
        waiting += [(inner, inside) for inner in ast.iter_child_nodes(node)]


def _parameters(function: Function) -> list[str]:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    return [n for n in names if n not in ("self", "cls")] + [a.arg for a in arguments.kwonlyargs]


def _argument(call: ast.Call, name: str, parameters: list[str]) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    place = parameters.index(name) if name in parameters else len(call.args)
    return call.args[place] if place < len(call.args) else None


def _default(function: Function, name: str) -> ast.expr | None:
    arguments = function.args
    pairs = [*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    plain = [*arguments.posonlyargs, *arguments.args]
    pairs += zip(plain[len(plain) - len(arguments.defaults) :], arguments.defaults, strict=True)
    return next((value for argument, value in pairs if argument.arg == name), None)


@cache
def error_names() -> frozenset[str]:
    """Names of `UserError` and of the classes below it."""
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for path in SOURCES.rglob("*.py")
        if "Error(" in (text := path.read_text("utf-8"))
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef)
    }
    names = {"UserError"}
    while more := {name for name, above in bases.items() if above & names} - names:
        names |= more
    return frozenset(names)


def refusals_of(text: str, module: str) -> Iterator[Refusal]:
    source = Source.read(text)
    takes_remedy = {
        name: function
        for name, function in source.functions.items()
        if "remedy" in _parameters(function)
    }
    for call, function in calls_of(source.tree):
        name = called(call)
        if name == "unknown_name":  # it composes the remedy from the choices
            where = texts_of(_argument(call, "where", UNKNOWN_NAME), source, function)
            texts = frozenset({f"there is no {VALUE}"}), frozenset(where), frozenset({VALUE})
            yield Refusal(f"{module}:{call.lineno}", function.name, *texts)
        if name not in error_names() and name not in takes_remedy:
            continue
        composer = takes_remedy.get(name)
        parameters = _parameters(composer) if composer else ["message"]
        remedy = _argument(call, "remedy", parameters)
        if remedy is None and composer:
            remedy = _default(composer, "remedy")
        if isinstance(remedy, ast.Name) and remedy.id in _parameters(function):
            continue  # the calls of this function are the refusals
        place = _argument(call, "where", parameters)
        has_place = composer is not None or name == "TaskError"  # by default
        parts = [a for a in call.args if " " in "".join(texts_of(a, source, function))]
        message = parts[0] if parts else call.args[0] if call.args else None
        yield Refusal(
            f"{module}:{call.lineno}",
            function.name,
            frozenset(texts_of(message, source, function)),
            frozenset(texts_of(place, source, function)) if place or has_place else None,
            None if remedy is None else frozenset(texts_of(remedy, source, function)),
        )


def all_refusals() -> list[Refusal]:
    return [
        refusal
        for path in sorted(SOURCES.rglob("*.py"))
        if "Error(" in (text := path.read_text("utf-8")) or "remedy" in text
        for refusal in refusals_of(text, str(path.relative_to(SOURCES)))
    ]
