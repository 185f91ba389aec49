"""docs/internals/tour.md: each step names a function that its file really defines."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOUR = (ROOT / "docs" / "internals" / "tour.md").read_text()
STEPS = re.findall(r"`([\w/]+\.py)`\s+`([\w.]+)`", TOUR)


def test_each_way_has_at_most_twelve_steps() -> None:
    ways = re.split(r"^## From ", TOUR, flags=re.M)[1:]
    assert len(ways) == 6
    for way in ways:
        assert 1 <= len(re.findall(r"^\d+\. ", way, re.M)) <= 12, way.partition("\n")[0]
    assert len(STEPS) > 30


def _source(file: str) -> str:
    """Return a file of the runtime, or of another package that its path begins with."""
    folder = ROOT / "src" if file.startswith("holdfast_") else ROOT / "src" / "holdfast"
    return (folder / file).read_text()


@pytest.mark.parametrize(("file", "name"), sorted(set(STEPS)))
def test_the_function_is_in_the_file(file: str, name: str) -> None:
    nodes: list[ast.AST] = [ast.parse(_source(file))]
    for part in name.split("."):
        nodes = [
            child
            for node in nodes
            for child in ast.iter_child_nodes(node)
            if getattr(child, "name", None) == part
        ]
        assert nodes, f"{file} has no {name}"
