"""Sums the changes of one fragment of the weights in a round, and leaves the rest as it is.

Each fragment has cells of its own (`core/sharding/fragments.py`), and so a reducer. Only the
reducers of the open fragment begin, so nothing else travels and no other sum changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from holdfast.parallel.axes.replicated import ReplicatedGradients


class FragmentGradients(ReplicatedGradients):
    """Gradients of a round, of which one fragment is open. numbers: the fragment of each parameter,
    by name."""

    def __init__(self, *args: Any, numbers: Mapping[str, int], **more: Any) -> None:
        super().__init__(*args, **more)
        self._numbers = numbers
        self._open: list[int] = []
        self._all_contributed = list(self._contributed_cells)

    def open_fragment(self, number: int, indices: Sequence[int]) -> None:
        """Choose the fragment of the next `begin`. indices: of its parameters, rising."""
        of_cell = [self._numbers[cell.boxes[0].name] for cell in self._cells]
        self.open_reducers = [
            r for r, of in zip(self.reducers, of_cell, strict=True) if of == number
        ]
        self._contributed_cells = [i for i in self._all_contributed if of_cell[i] == number]
        self._open = list(indices)

    def fill_leaf(self, leaf: int, gradients: Sequence[Tensor]) -> None:
        """A complete leaf of the open fragment: one tensor for each of its parameters."""
        self._open_slot(leaf)
        for index, gradient in zip(self._open, gradients, strict=True):
            self._take(index, gradient)
        self._progress.close()
