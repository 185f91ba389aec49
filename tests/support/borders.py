"""Entries that a border does not list, drawn and not picked, for tests of the real readers."""

from __future__ import annotations

import ast
import importlib
import random
from collections.abc import Iterator
from pathlib import Path

import holdfast
from holdfast.borders import Border

SRC = Path(holdfast.__file__).parent.parent


def unknown_entries(border: Border, count: int = 4, seed: int = 1) -> dict[str, object]:
    """Return `count` names that no list of `border` has, each with a value that says something.

    Names are free words, and listed names with one letter added. Values are texts, numbers (also
    0), lists and objects.
    """
    draw = random.Random(f"{border.name} {seed}")
    listed = sorted({*border.used, *border.harmless, *border.plain})
    values = (
        lambda: draw.randrange(2, 99),
        lambda: 0,
        lambda: "word",
        lambda: [1],
        lambda: {"a": 1},
    )
    out: dict[str, object] = {}
    while len(out) < count:
        name = "".join(draw.choice("abcdefghklmnoprstuw") for _ in range(draw.randrange(5, 12)))
        if listed and len(out) % 2 == 0:
            base = draw.choice(listed)
            place = draw.randrange(len(base) + 1)
            name = base[:place] + draw.choice("xqz") + base[place:]
        if name not in listed:
            out[name] = values[len(out) % len(values)]()
    return out


def all_borders() -> Iterator[tuple[str, str, Border]]:
    """Module, name of the constant and border, for each constant of src that is a border."""
    for path in sorted(SRC.glob("holdfast*/**/*.py")):
        text = path.read_text("utf-8")
        if "Border(" not in text:
            continue
        module = ".".join(path.relative_to(SRC).with_suffix("").parts)
        for node in ast.parse(text).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if isinstance(target, ast.Name):
                value = getattr(importlib.import_module(module), target.id)
                each = value.values() if isinstance(value, dict) else [value]
                yield from ((module, target.id, one) for one in each if isinstance(one, Border))
