"""The places in `src` that build a message with a remedy, found in the syntax trees.

A site is a call with the keyword `remedy`. If a function gets the remedy as a parameter, its calls
are the sites. A call that passes on the remedy of a caught error is none: the first place counts.
The name of a site is its module and its message; what is filled in is `…`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.ranks import ROOT

SOURCES = ROOT / "src"
RUNTIME = "holdfast/"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Site:
    name: str
    first_line: int
    last_line: int


def _text(node: ast.expr | None) -> str:
    """The message of a call, or the expression that makes it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(v) if isinstance(v, ast.Constant) else "…" for v in node.values)
    if isinstance(node, ast.IfExp):
        return f"{_text(node.body)} | {_text(node.orelse)}"
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "…"


def _calls(tree: ast.AST) -> Iterator[tuple[ast.Call, Function]]:
    """Every call, and the function that it stands in."""
    waiting: list[tuple[ast.AST, Function | None]] = [(tree, None)]
    while waiting:
        node, inside = waiting.pop()
        if isinstance(node, Function):
            inside = node
        elif isinstance(node, ast.Call) and inside is not None:
            yield node, inside
        waiting += [(inner, inside) for inner in ast.iter_child_nodes(node)]


def _parameters(function: Function) -> set[str]:
    arguments = function.args
    return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def _remedy(call: ast.Call) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == "remedy"), None)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)


def _first_text(call: ast.Call) -> str:
    """The message: the first argument that is one, or a name for the place."""
    texts = [t for argument in call.args if " " in (t := _text(argument))]
    return texts[0] if texts else f"({_called(call)})"


def sites_of(text: str, module: str) -> list[Site]:
    calls = list(_calls(ast.parse(text)))
    found, wrappers = [], set()
    for call, function in calls:
        remedy = _remedy(call)
        if remedy is None or (isinstance(remedy, ast.Attribute) and remedy.attr == "remedy"):
            continue
        if isinstance(remedy, ast.Name) and remedy.id in _parameters(function):
            wrappers.add(function.name)
            continue
        if function.name in ("_rebuild_user_error", "error_from_json", "_error_from_json"):
            continue  # an error of another process
        found.append((call, function))
    found += [(call, function) for call, function in calls if _called(call) in wrappers]
    return [
        Site(f"{module}: {_name(call, function)}", call.lineno, call.end_lineno or call.lineno)
        for call, function in found
        if _remedy(call) is not None or _called(call) in wrappers
    ]


def _name(call: ast.Call, function: Function) -> str:
    text = _first_text(call)
    return text if not text.startswith("(") else f"({function.name})"


@cache
def _sites_of_module(module: str) -> tuple[Site, ...]:
    """module: a path below `src/holdfast`, or below `src` for other packages."""
    folder = SOURCES if module.startswith("holdfast_") else SOURCES / RUNTIME
    text = (folder / module).read_text("utf-8")
    return tuple(sites_of(text, module)) if "remedy" in text else ()


def site_names() -> set[str]:
    modules = (
        str(path.relative_to(SOURCES)).removeprefix(RUNTIME) for path in SOURCES.rglob("*.py")
    )
    return {site.name for module in modules for site in _sites_of_module(module)}


def names_at(module: str, line: int) -> set[str]:
    """The sites of a module that a line belongs to."""
    sites = _sites_of_module(module)
    return {site.name for site in sites if site.first_line <= line <= site.last_line}


def module_of(file: str) -> str:
    path = Path(file)
    return (
        str(path.relative_to(SOURCES)).removeprefix(RUNTIME) if path.is_relative_to(SOURCES) else ""
    )
