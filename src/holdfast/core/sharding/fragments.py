"""Fragments of the weights, of which a round of learners exchanges one.

A fragment is made of complete blocks, as in Streaming DiLoCo (Douillard et al., 2025, section 2.1),
and of the tensors outside of blocks. The largest comes first, each into the fragment that is
smallest so far. So the bytes of the rounds differ little if the model has many blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from holdfast.core.sharding.parameters import Parameter
from holdfast.core.sharding.reduction_cells import Cell


def fragment_of(rows: Iterable[Parameter], fragments: int) -> dict[str, int]:
    """Return the number of the fragment of each parameter, by name. None is empty if the model has
    as many blocks as there are fragments."""
    sizes: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    for row in rows:
        unit = _unit(row.name)
        sizes[unit] = sizes.get(unit, 0) + row.size
        names.setdefault(unit, []).append(row.name)
    filled = [0] * fragments
    found: dict[str, int] = {}
    for unit in sorted(sizes, key=lambda unit: -sizes[unit]):
        number = min(range(fragments), key=lambda number: filled[number])
        filled[number] += sizes[unit]
        found |= dict.fromkeys(names[unit], number)
    return found


def _unit(name: str) -> str:
    """The block of a parameter; a parameter outside of blocks is one of its own."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else name


def cut_cells(cells: Iterable[Cell], rows: Sequence[Parameter], fragments: int) -> tuple[Cell, ...]:
    """Return a cell for each fragment of each cell, so that a round can sum one fragment alone."""
    of = fragment_of(rows, fragments)
    parts = (
        replace(cell, boxes=tuple(box for box in cell.boxes if of[box.name] == number))
        for cell in cells
        for number in range(fragments)
    )
    return tuple(part for part in parts if part.boxes)
