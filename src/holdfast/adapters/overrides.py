"""Finds what an author's class overrides of a framework's class, and refuses what is not called.

A framework's loop calls methods that Holdfast's loop does not. The names come from the installed
framework: what a `Border` of them does not list is refused if the author has overridden it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from holdfast.borders import Border
from holdfast.errors import TaskError


def names(text: str) -> frozenset[str]:
    """Return the words of a list for a `Border`."""
    return frozenset(text.split())


def overridden(made: object, packages: Collection[str]) -> Mapping[str, str]:
    """Return the methods of the framework's classes that `made` or its class overrides.

    Args:
        packages: top-level packages of the framework.

    Returns: name -> "Class.name (file.py:12)". Names with two underscores are Python's own.
    """
    out, kinds = {}, type(made).__mro__
    is_framework = {kind: kind.__module__.partition(".")[0] in packages for kind in kinds}
    for name in sorted({name for kind in kinds if is_framework[kind] for name in vars(kind)}):
        if name.startswith("__"):
            continue
        owner = next(kind for kind in kinds if name in vars(kind))
        if name in vars(made):
            out[name] = f"{type(made).__name__}.{name}{_place(vars(made)[name])}"
        elif not is_framework[owner]:
            out[name] = f"{owner.__name__}.{name}{_place(vars(owner)[name])}"
    return out


def refuse_overridden(
    made: object, packages: Collection[str], border: Border, where: str, remedy: str
) -> Mapping[str, str]:
    """Return what is overridden. Raises TaskError for what the border does not list."""
    found = overridden(made, packages)
    if unlisted := border.unread(found):
        verb = "is" if len(unlisted) == 1 else "are"
        raise TaskError(
            f"{', '.join(found[name] for name in unlisted)} {verb} not called by Holdfast, and "
            "could change the curve",
            where=where,
            remedy=remedy,
        )
    return found


def _place(member: Any) -> str:
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    code = getattr(function, "__code__", None)
    return "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"
